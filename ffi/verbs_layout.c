/*
 * What infiniband/verbs.h says about every structure and constant that src/sys/ibverbs declares.
 *
 * One line each, for tests/ffi_layout.rs, which compares them with the Rust declarations:
 *     type NAME SIZE ALIGNMENT
 *     field NAME.FIELD OFFSET SIZE
 *     constant NAME VALUE
 * Names are those of the Rust side; where C has none, as for the parts of unions, TYPE and FIELD say
 * which part is meant. A name that the header does not have fails the compilation.
 */
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdio.h>

/* The type of a part of a structure. */
#define IN(type, part) __typeof__(((type *)0)->part)

#define TYPE(name, ...) printf("type " #name " %zu %zu\n", sizeof(__VA_ARGS__), _Alignof(__VA_ARGS__))
#define FIELD(name, type, field, part) \
    printf("field " #name "." #field " %zu %zu\n", offsetof(type, part), sizeof(((type *)0)->part))
#define STRUCT(name) TYPE(name, struct name)
#define MEMBER(name, field) FIELD(name, struct name, field, field)
#define CONSTANT(name) printf("constant " #name " %lld\n", (long long)(name))

static void types(void)
{
    STRUCT(ibv_device);
    MEMBER(ibv_device, _ops);
    MEMBER(ibv_device, node_type);
    MEMBER(ibv_device, transport_type);
    MEMBER(ibv_device, name);
    MEMBER(ibv_device, dev_name);
    MEMBER(ibv_device, dev_path);
    MEMBER(ibv_device, ibdev_path);

    STRUCT(ibv_context_ops);
    MEMBER(ibv_context_ops, _compat_query_device);
    MEMBER(ibv_context_ops, _compat_query_port);
    MEMBER(ibv_context_ops, _compat_alloc_pd);
    MEMBER(ibv_context_ops, _compat_dealloc_pd);
    MEMBER(ibv_context_ops, _compat_reg_mr);
    MEMBER(ibv_context_ops, _compat_rereg_mr);
    MEMBER(ibv_context_ops, _compat_dereg_mr);
    MEMBER(ibv_context_ops, alloc_mw);
    MEMBER(ibv_context_ops, bind_mw);
    MEMBER(ibv_context_ops, dealloc_mw);
    MEMBER(ibv_context_ops, _compat_create_cq);
    MEMBER(ibv_context_ops, poll_cq);
    MEMBER(ibv_context_ops, req_notify_cq);
    MEMBER(ibv_context_ops, _compat_cq_event);
    MEMBER(ibv_context_ops, _compat_resize_cq);
    MEMBER(ibv_context_ops, _compat_destroy_cq);
    MEMBER(ibv_context_ops, _compat_create_srq);
    MEMBER(ibv_context_ops, _compat_modify_srq);
    MEMBER(ibv_context_ops, _compat_query_srq);
    MEMBER(ibv_context_ops, _compat_destroy_srq);
    MEMBER(ibv_context_ops, post_srq_recv);
    MEMBER(ibv_context_ops, _compat_create_qp);
    MEMBER(ibv_context_ops, _compat_query_qp);
    MEMBER(ibv_context_ops, _compat_modify_qp);
    MEMBER(ibv_context_ops, _compat_destroy_qp);
    MEMBER(ibv_context_ops, post_send);
    MEMBER(ibv_context_ops, post_recv);
    MEMBER(ibv_context_ops, _compat_create_ah);
    MEMBER(ibv_context_ops, _compat_destroy_ah);
    MEMBER(ibv_context_ops, _compat_attach_mcast);
    MEMBER(ibv_context_ops, _compat_detach_mcast);
    MEMBER(ibv_context_ops, _compat_async_event);

    STRUCT(ibv_context);
    MEMBER(ibv_context, device);
    MEMBER(ibv_context, ops);
    MEMBER(ibv_context, cmd_fd);
    MEMBER(ibv_context, async_fd);
    MEMBER(ibv_context, num_comp_vectors);
    MEMBER(ibv_context, mutex);
    MEMBER(ibv_context, abi_compat);

    STRUCT(ibv_device_attr);
    MEMBER(ibv_device_attr, fw_ver);
    MEMBER(ibv_device_attr, node_guid);
    MEMBER(ibv_device_attr, sys_image_guid);
    MEMBER(ibv_device_attr, max_mr_size);
    MEMBER(ibv_device_attr, page_size_cap);
    MEMBER(ibv_device_attr, vendor_id);
    MEMBER(ibv_device_attr, vendor_part_id);
    MEMBER(ibv_device_attr, hw_ver);
    MEMBER(ibv_device_attr, max_qp);
    MEMBER(ibv_device_attr, max_qp_wr);
    MEMBER(ibv_device_attr, device_cap_flags);
    MEMBER(ibv_device_attr, max_sge);
    MEMBER(ibv_device_attr, max_sge_rd);
    MEMBER(ibv_device_attr, max_cq);
    MEMBER(ibv_device_attr, max_cqe);
    MEMBER(ibv_device_attr, max_mr);
    MEMBER(ibv_device_attr, max_pd);
    MEMBER(ibv_device_attr, max_qp_rd_atom);
    MEMBER(ibv_device_attr, max_ee_rd_atom);
    MEMBER(ibv_device_attr, max_res_rd_atom);
    MEMBER(ibv_device_attr, max_qp_init_rd_atom);
    MEMBER(ibv_device_attr, max_ee_init_rd_atom);
    MEMBER(ibv_device_attr, atomic_cap);
    MEMBER(ibv_device_attr, max_ee);
    MEMBER(ibv_device_attr, max_rdd);
    MEMBER(ibv_device_attr, max_mw);
    MEMBER(ibv_device_attr, max_raw_ipv6_qp);
    MEMBER(ibv_device_attr, max_raw_ethy_qp);
    MEMBER(ibv_device_attr, max_mcast_grp);
    MEMBER(ibv_device_attr, max_mcast_qp_attach);
    MEMBER(ibv_device_attr, max_total_mcast_qp_attach);
    MEMBER(ibv_device_attr, max_ah);
    MEMBER(ibv_device_attr, max_fmr);
    MEMBER(ibv_device_attr, max_map_per_fmr);
    MEMBER(ibv_device_attr, max_srq);
    MEMBER(ibv_device_attr, max_srq_wr);
    MEMBER(ibv_device_attr, max_srq_sge);
    MEMBER(ibv_device_attr, max_pkeys);
    MEMBER(ibv_device_attr, local_ca_ack_delay);
    MEMBER(ibv_device_attr, phys_port_cnt);

    STRUCT(ibv_port_attr);
    MEMBER(ibv_port_attr, state);
    MEMBER(ibv_port_attr, max_mtu);
    MEMBER(ibv_port_attr, active_mtu);
    MEMBER(ibv_port_attr, gid_tbl_len);
    MEMBER(ibv_port_attr, port_cap_flags);
    MEMBER(ibv_port_attr, max_msg_sz);
    MEMBER(ibv_port_attr, bad_pkey_cntr);
    MEMBER(ibv_port_attr, qkey_viol_cntr);
    MEMBER(ibv_port_attr, pkey_tbl_len);
    MEMBER(ibv_port_attr, lid);
    MEMBER(ibv_port_attr, sm_lid);
    MEMBER(ibv_port_attr, lmc);
    MEMBER(ibv_port_attr, max_vl_num);
    MEMBER(ibv_port_attr, sm_sl);
    MEMBER(ibv_port_attr, subnet_timeout);
    MEMBER(ibv_port_attr, init_type_reply);
    MEMBER(ibv_port_attr, active_width);
    MEMBER(ibv_port_attr, active_speed);
    MEMBER(ibv_port_attr, phys_state);
    MEMBER(ibv_port_attr, link_layer);
    MEMBER(ibv_port_attr, flags);
    MEMBER(ibv_port_attr, port_cap_flags2);

    TYPE(ibv_gid, union ibv_gid);
    FIELD(ibv_gid, union ibv_gid, raw, raw);

    STRUCT(ibv_gid_entry);
    MEMBER(ibv_gid_entry, gid);
    MEMBER(ibv_gid_entry, gid_index);
    MEMBER(ibv_gid_entry, port_num);
    MEMBER(ibv_gid_entry, gid_type);
    MEMBER(ibv_gid_entry, ndev_ifindex);

    STRUCT(ibv_pd);
    MEMBER(ibv_pd, context);
    MEMBER(ibv_pd, handle);

    STRUCT(ibv_mr);
    MEMBER(ibv_mr, context);
    MEMBER(ibv_mr, pd);
    MEMBER(ibv_mr, addr);
    MEMBER(ibv_mr, length);
    MEMBER(ibv_mr, handle);
    MEMBER(ibv_mr, lkey);
    MEMBER(ibv_mr, rkey);

    STRUCT(ibv_mw);
    MEMBER(ibv_mw, context);
    MEMBER(ibv_mw, pd);
    MEMBER(ibv_mw, rkey);
    MEMBER(ibv_mw, handle);
    MEMBER(ibv_mw, type);

    STRUCT(ibv_mw_bind_info);
    MEMBER(ibv_mw_bind_info, mr);
    MEMBER(ibv_mw_bind_info, addr);
    MEMBER(ibv_mw_bind_info, length);
    MEMBER(ibv_mw_bind_info, mw_access_flags);

    STRUCT(ibv_mw_bind);
    MEMBER(ibv_mw_bind, wr_id);
    MEMBER(ibv_mw_bind, send_flags);
    MEMBER(ibv_mw_bind, bind_info);

    STRUCT(ibv_comp_channel);
    MEMBER(ibv_comp_channel, context);
    MEMBER(ibv_comp_channel, fd);
    MEMBER(ibv_comp_channel, refcnt);

    STRUCT(ibv_cq);
    MEMBER(ibv_cq, context);
    MEMBER(ibv_cq, channel);
    MEMBER(ibv_cq, cq_context);
    MEMBER(ibv_cq, handle);
    MEMBER(ibv_cq, cqe);
    MEMBER(ibv_cq, mutex);
    MEMBER(ibv_cq, cond);
    MEMBER(ibv_cq, comp_events_completed);
    MEMBER(ibv_cq, async_events_completed);

    STRUCT(ibv_qp);
    MEMBER(ibv_qp, context);
    MEMBER(ibv_qp, qp_context);
    MEMBER(ibv_qp, pd);
    MEMBER(ibv_qp, send_cq);
    MEMBER(ibv_qp, recv_cq);
    MEMBER(ibv_qp, srq);
    MEMBER(ibv_qp, handle);
    MEMBER(ibv_qp, qp_num);
    MEMBER(ibv_qp, state);
    MEMBER(ibv_qp, qp_type);
    MEMBER(ibv_qp, mutex);
    MEMBER(ibv_qp, cond);
    MEMBER(ibv_qp, events_completed);

    STRUCT(ibv_qp_cap);
    MEMBER(ibv_qp_cap, max_send_wr);
    MEMBER(ibv_qp_cap, max_recv_wr);
    MEMBER(ibv_qp_cap, max_send_sge);
    MEMBER(ibv_qp_cap, max_recv_sge);
    MEMBER(ibv_qp_cap, max_inline_data);

    STRUCT(ibv_qp_init_attr);
    MEMBER(ibv_qp_init_attr, qp_context);
    MEMBER(ibv_qp_init_attr, send_cq);
    MEMBER(ibv_qp_init_attr, recv_cq);
    MEMBER(ibv_qp_init_attr, srq);
    MEMBER(ibv_qp_init_attr, cap);
    MEMBER(ibv_qp_init_attr, qp_type);
    MEMBER(ibv_qp_init_attr, sq_sig_all);

    STRUCT(ibv_global_route);
    MEMBER(ibv_global_route, dgid);
    MEMBER(ibv_global_route, flow_label);
    MEMBER(ibv_global_route, sgid_index);
    MEMBER(ibv_global_route, hop_limit);
    MEMBER(ibv_global_route, traffic_class);

    STRUCT(ibv_ah_attr);
    MEMBER(ibv_ah_attr, grh);
    MEMBER(ibv_ah_attr, dlid);
    MEMBER(ibv_ah_attr, sl);
    MEMBER(ibv_ah_attr, src_path_bits);
    MEMBER(ibv_ah_attr, static_rate);
    MEMBER(ibv_ah_attr, is_global);
    MEMBER(ibv_ah_attr, port_num);

    STRUCT(ibv_qp_attr);
    MEMBER(ibv_qp_attr, qp_state);
    MEMBER(ibv_qp_attr, cur_qp_state);
    MEMBER(ibv_qp_attr, path_mtu);
    MEMBER(ibv_qp_attr, path_mig_state);
    MEMBER(ibv_qp_attr, qkey);
    MEMBER(ibv_qp_attr, rq_psn);
    MEMBER(ibv_qp_attr, sq_psn);
    MEMBER(ibv_qp_attr, dest_qp_num);
    MEMBER(ibv_qp_attr, qp_access_flags);
    MEMBER(ibv_qp_attr, cap);
    MEMBER(ibv_qp_attr, ah_attr);
    MEMBER(ibv_qp_attr, alt_ah_attr);
    MEMBER(ibv_qp_attr, pkey_index);
    MEMBER(ibv_qp_attr, alt_pkey_index);
    MEMBER(ibv_qp_attr, en_sqd_async_notify);
    MEMBER(ibv_qp_attr, sq_draining);
    MEMBER(ibv_qp_attr, max_rd_atomic);
    MEMBER(ibv_qp_attr, max_dest_rd_atomic);
    MEMBER(ibv_qp_attr, min_rnr_timer);
    MEMBER(ibv_qp_attr, port_num);
    MEMBER(ibv_qp_attr, timeout);
    MEMBER(ibv_qp_attr, retry_cnt);
    MEMBER(ibv_qp_attr, rnr_retry);
    MEMBER(ibv_qp_attr, alt_port_num);
    MEMBER(ibv_qp_attr, alt_timeout);
    MEMBER(ibv_qp_attr, rate_limit);

    STRUCT(ibv_sge);
    MEMBER(ibv_sge, addr);
    MEMBER(ibv_sge, length);
    MEMBER(ibv_sge, lkey);

    TYPE(ibv_wr_rdma, IN(struct ibv_send_wr, wr.rdma));
    FIELD(ibv_wr_rdma, IN(struct ibv_send_wr, wr.rdma), remote_addr, remote_addr);
    FIELD(ibv_wr_rdma, IN(struct ibv_send_wr, wr.rdma), rkey, rkey);

    TYPE(ibv_wr_atomic, IN(struct ibv_send_wr, wr.atomic));
    FIELD(ibv_wr_atomic, IN(struct ibv_send_wr, wr.atomic), remote_addr, remote_addr);
    FIELD(ibv_wr_atomic, IN(struct ibv_send_wr, wr.atomic), compare_add, compare_add);
    FIELD(ibv_wr_atomic, IN(struct ibv_send_wr, wr.atomic), swap, swap);
    FIELD(ibv_wr_atomic, IN(struct ibv_send_wr, wr.atomic), rkey, rkey);

    TYPE(ibv_wr, IN(struct ibv_send_wr, wr));
    FIELD(ibv_wr, IN(struct ibv_send_wr, wr), rdma, rdma);
    FIELD(ibv_wr, IN(struct ibv_send_wr, wr), atomic, atomic);

    TYPE(ibv_wr_bind_mw, IN(struct ibv_send_wr, bind_mw));
    FIELD(ibv_wr_bind_mw, IN(struct ibv_send_wr, bind_mw), mw, mw);
    FIELD(ibv_wr_bind_mw, IN(struct ibv_send_wr, bind_mw), rkey, rkey);
    FIELD(ibv_wr_bind_mw, IN(struct ibv_send_wr, bind_mw), bind_info, bind_info);

    STRUCT(ibv_send_wr);
    MEMBER(ibv_send_wr, wr_id);
    MEMBER(ibv_send_wr, next);
    MEMBER(ibv_send_wr, sg_list);
    MEMBER(ibv_send_wr, num_sge);
    MEMBER(ibv_send_wr, opcode);
    MEMBER(ibv_send_wr, send_flags);
    MEMBER(ibv_send_wr, imm_data);
    MEMBER(ibv_send_wr, wr);
    FIELD(ibv_send_wr, struct ibv_send_wr, remote_srqn, qp_type.xrc.remote_srqn);
    MEMBER(ibv_send_wr, bind_mw);

    STRUCT(ibv_recv_wr);
    MEMBER(ibv_recv_wr, wr_id);
    MEMBER(ibv_recv_wr, next);
    MEMBER(ibv_recv_wr, sg_list);
    MEMBER(ibv_recv_wr, num_sge);

    STRUCT(ibv_wc);
    MEMBER(ibv_wc, wr_id);
    MEMBER(ibv_wc, status);
    MEMBER(ibv_wc, opcode);
    MEMBER(ibv_wc, vendor_err);
    MEMBER(ibv_wc, byte_len);
    MEMBER(ibv_wc, imm_data);
    MEMBER(ibv_wc, qp_num);
    MEMBER(ibv_wc, src_qp);
    MEMBER(ibv_wc, wc_flags);
    MEMBER(ibv_wc, pkey_index);
    MEMBER(ibv_wc, slid);
    MEMBER(ibv_wc, sl);
    MEMBER(ibv_wc, dlid_path_bits);

    TYPE(ibv_async_element, IN(struct ibv_async_event, element));
    FIELD(ibv_async_element, IN(struct ibv_async_event, element), cq, cq);
    FIELD(ibv_async_element, IN(struct ibv_async_event, element), qp, qp);
    FIELD(ibv_async_element, IN(struct ibv_async_event, element), srq, srq);
    FIELD(ibv_async_element, IN(struct ibv_async_event, element), wq, wq);
    FIELD(ibv_async_element, IN(struct ibv_async_event, element), port_num, port_num);

    STRUCT(ibv_async_event);
    MEMBER(ibv_async_event, element);
    MEMBER(ibv_async_event, event_type);
}

static void constants(void)
{
    CONSTANT(IBV_SYSFS_NAME_MAX);
    CONSTANT(IBV_SYSFS_PATH_MAX);
    CONSTANT(IBV_NODE_CA);
    CONSTANT(IBV_TRANSPORT_IB);
    CONSTANT(IBV_MTU_256);
    CONSTANT(IBV_MTU_512);
    CONSTANT(IBV_MTU_1024);
    CONSTANT(IBV_MTU_2048);
    CONSTANT(IBV_MTU_4096);
    CONSTANT(IBV_PORT_NOP);
    CONSTANT(IBV_PORT_DOWN);
    CONSTANT(IBV_PORT_INIT);
    CONSTANT(IBV_PORT_ARMED);
    CONSTANT(IBV_PORT_ACTIVE);
    CONSTANT(IBV_PORT_ACTIVE_DEFER);
    CONSTANT(IBV_LINK_LAYER_UNSPECIFIED);
    CONSTANT(IBV_LINK_LAYER_INFINIBAND);
    CONSTANT(IBV_LINK_LAYER_ETHERNET);
    CONSTANT(IBV_GID_TYPE_IB);
    CONSTANT(IBV_GID_TYPE_ROCE_V1);
    CONSTANT(IBV_GID_TYPE_ROCE_V2);
    CONSTANT(IBV_EVENT_CQ_ERR);
    CONSTANT(IBV_EVENT_QP_FATAL);
    CONSTANT(IBV_EVENT_QP_REQ_ERR);
    CONSTANT(IBV_EVENT_QP_ACCESS_ERR);
    CONSTANT(IBV_EVENT_COMM_EST);
    CONSTANT(IBV_EVENT_SQ_DRAINED);
    CONSTANT(IBV_EVENT_PATH_MIG);
    CONSTANT(IBV_EVENT_PATH_MIG_ERR);
    CONSTANT(IBV_EVENT_DEVICE_FATAL);
    CONSTANT(IBV_EVENT_PORT_ACTIVE);
    CONSTANT(IBV_EVENT_PORT_ERR);
    CONSTANT(IBV_EVENT_LID_CHANGE);
    CONSTANT(IBV_EVENT_PKEY_CHANGE);
    CONSTANT(IBV_EVENT_SM_CHANGE);
    CONSTANT(IBV_EVENT_SRQ_ERR);
    CONSTANT(IBV_EVENT_SRQ_LIMIT_REACHED);
    CONSTANT(IBV_EVENT_QP_LAST_WQE_REACHED);
    CONSTANT(IBV_EVENT_CLIENT_REREGISTER);
    CONSTANT(IBV_EVENT_GID_CHANGE);
    CONSTANT(IBV_EVENT_WQ_FATAL);
    CONSTANT(IBV_WC_SUCCESS);
    CONSTANT(IBV_WC_LOC_LEN_ERR);
    CONSTANT(IBV_WC_LOC_QP_OP_ERR);
    CONSTANT(IBV_WC_LOC_EEC_OP_ERR);
    CONSTANT(IBV_WC_LOC_PROT_ERR);
    CONSTANT(IBV_WC_WR_FLUSH_ERR);
    CONSTANT(IBV_WC_MW_BIND_ERR);
    CONSTANT(IBV_WC_BAD_RESP_ERR);
    CONSTANT(IBV_WC_LOC_ACCESS_ERR);
    CONSTANT(IBV_WC_REM_INV_REQ_ERR);
    CONSTANT(IBV_WC_REM_ACCESS_ERR);
    CONSTANT(IBV_WC_REM_OP_ERR);
    CONSTANT(IBV_WC_RETRY_EXC_ERR);
    CONSTANT(IBV_WC_RNR_RETRY_EXC_ERR);
    CONSTANT(IBV_WC_REM_ABORT_ERR);
    CONSTANT(IBV_WC_FATAL_ERR);
    CONSTANT(IBV_WC_RESP_TIMEOUT_ERR);
    CONSTANT(IBV_WC_GENERAL_ERR);
    CONSTANT(IBV_QPT_RC);
    CONSTANT(IBV_QPS_RESET);
    CONSTANT(IBV_QPS_INIT);
    CONSTANT(IBV_QPS_RTR);
    CONSTANT(IBV_QPS_RTS);
    CONSTANT(IBV_QPS_SQD);
    CONSTANT(IBV_QPS_SQE);
    CONSTANT(IBV_QPS_ERR);
    CONSTANT(IBV_QP_STATE);
    CONSTANT(IBV_QP_ACCESS_FLAGS);
    CONSTANT(IBV_QP_PKEY_INDEX);
    CONSTANT(IBV_QP_PORT);
    CONSTANT(IBV_QP_AV);
    CONSTANT(IBV_QP_PATH_MTU);
    CONSTANT(IBV_QP_TIMEOUT);
    CONSTANT(IBV_QP_RETRY_CNT);
    CONSTANT(IBV_QP_RNR_RETRY);
    CONSTANT(IBV_QP_RQ_PSN);
    CONSTANT(IBV_QP_MAX_QP_RD_ATOMIC);
    CONSTANT(IBV_QP_MIN_RNR_TIMER);
    CONSTANT(IBV_QP_SQ_PSN);
    CONSTANT(IBV_QP_MAX_DEST_RD_ATOMIC);
    CONSTANT(IBV_QP_CAP);
    CONSTANT(IBV_QP_DEST_QPN);
    CONSTANT(IBV_WR_RDMA_WRITE);
    CONSTANT(IBV_WR_SEND);
    CONSTANT(IBV_WR_RDMA_READ);
    CONSTANT(IBV_WR_LOCAL_INV);
    CONSTANT(IBV_WR_BIND_MW);
    CONSTANT(IBV_SEND_FENCE);
    CONSTANT(IBV_SEND_SIGNALED);
    CONSTANT(IBV_SEND_SOLICITED);
    CONSTANT(IBV_SEND_INLINE);
    CONSTANT(IBV_DEVICE_MEM_WINDOW_TYPE_2A);
    CONSTANT(IBV_DEVICE_MEM_WINDOW_TYPE_2B);
    CONSTANT(IBV_MW_TYPE_2);
    CONSTANT(IBV_ACCESS_LOCAL_WRITE);
    CONSTANT(IBV_ACCESS_REMOTE_WRITE);
    CONSTANT(IBV_ACCESS_REMOTE_READ);
    CONSTANT(IBV_ACCESS_REMOTE_ATOMIC);
    CONSTANT(IBV_ACCESS_MW_BIND);
    CONSTANT(IBV_ACCESS_RELAXED_ORDERING);
}

int main(void)
{
    types();
    constants();
    return 0;
}
