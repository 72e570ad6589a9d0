//! Independent witnesses (feature `crosscheck`): the layouts of `src/sys/ibverbs` against the crate
//! `rdma-sys`, and devices and addresses as sysfs shows them against the crate `ibverbs`.
//!
//! Where a crate names a part in its own way, the structure's size and the offsets around it speak
//! for the part; `tests/ffi_layout.rs` compares each one with the header. The crates link libibverbs,
//! which is why the feature is off by default.

use std::io::Write;
use std::mem::{align_of, offset_of, size_of};

use kvrail::sys::ibverbs as ours;
use kvrail::sys::rdma_sysfs;
use kvrail::sys::root::HostRoot;

/// Adds what differs of each structure to a list.
macro_rules! differences {
    ($into:ident: $($name:ident { $($field:ident $(as $theirs:ident)?),+ })+) => {$(
        let (a, b) = (size_of::<ours::$name>(), size_of::<rdma_sys::$name>());
        $into.push((stringify!($name), "size", a, b));
        let (a, b) = (align_of::<ours::$name>(), align_of::<rdma_sys::$name>());
        $into.push((stringify!($name), "alignment", a, b));
        $(
            let a = offset_of!(ours::$name, $field);
            let b = differences!(@ $name, $field $(, $theirs)?);
            $into.push((stringify!($name), stringify!($field), a, b));
        )+
    )+};
    (@ $name:ident, $field:ident) => { offset_of!(rdma_sys::$name, $field) };
    (@ $name:ident, $field:ident, $theirs:ident) => { offset_of!(rdma_sys::$name, $theirs) };
}

#[rustfmt::skip]
fn compared() -> Vec<(&'static str, &'static str, usize, usize)> {
    let mut all = Vec::new();
    differences! { all:
        ibv_device { _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ibv_context_ops { _compat_query_device, _compat_query_port, _compat_alloc_pd,
            _compat_dealloc_pd, _compat_reg_mr, _compat_rereg_mr, _compat_dereg_mr, alloc_mw,
            bind_mw, dealloc_mw, _compat_create_cq, poll_cq, req_notify_cq, _compat_cq_event,
            _compat_resize_cq, _compat_destroy_cq, _compat_create_srq, _compat_modify_srq,
            _compat_query_srq, _compat_destroy_srq, post_srq_recv, _compat_create_qp,
            _compat_query_qp, _compat_modify_qp, _compat_destroy_qp, post_send, post_recv,
            _compat_create_ah, _compat_destroy_ah, _compat_attach_mcast, _compat_detach_mcast,
            _compat_async_event }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        ibv_device_attr { fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap,
            vendor_id, vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge,
            max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom,
            max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee,
            max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach,
            max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr,
            max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt }
        ibv_port_attr { state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz,
            bad_pkey_cntr, qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl,
            subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer,
            flags, port_cap_flags2 }
        ibv_gid { raw }
        ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_mw { context, pd, rkey, handle, r#type as type_ }
        ibv_mw_bind_info { mr, addr, length, mw_access_flags }
        ibv_mw_bind { wr_id, send_flags, bind_info }
        ibv_comp_channel { context, fd, refcnt }
        ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed,
            async_events_completed }
        ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type,
            mutex, cond, events_completed }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_qp_attr { qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn,
            dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index,
            en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer,
            port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit }
        ibv_sge { addr, length, lkey }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, wr }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_wc { wr_id, status, opcode, vendor_err, byte_len, qp_num, src_qp, wc_flags,
            pkey_index, slid, sl, dlid_path_bits }
        ibv_async_event { element, event_type }
    }
    all
}

#[test]
fn layouts_are_those_of_rdma_sys() {
    let all = compared();
    assert!(all.len() > 200, "{}", all.len());
    let wrong: Vec<_> = all.iter().filter(|(_, _, ours, theirs)| ours != theirs).collect();
    assert!(wrong.is_empty(), "(structure, part, ours, theirs): {wrong:?}");
}

/// The names of the devices, and for each one that `ibverbs` opens (its first port must be up) the
/// indices and bytes of that port's addresses.
#[test]
fn devices_and_addresses_are_those_of_ibverbs() {
    let theirs = match ibverbs::devices() {
        Ok(devices) if !devices.is_empty() => devices,
        none => {
            let reason = none.map_or_else(|error| error.to_string(), |_| "no device".to_owned());
            // Past the harness, which hides what a passing test prints.
            writeln!(
                std::io::stderr(),
                "SKIPPED devices_and_addresses_are_those_of_ibverbs: {reason}"
            )
            .unwrap();
            return;
        }
    };
    let ours = rdma_sysfs::devices(&HostRoot::host());
    let mut names: Vec<String> =
        theirs.iter().map(|it| it.name().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    assert_eq!(ours.iter().map(|it| it.name.clone()).collect::<Vec<_>>(), names);
    for device in theirs.iter() {
        let name = device.name().unwrap().to_str().unwrap();
        let port = &ours.iter().find(|it| it.name == name).unwrap().ports[0];
        let Ok(context) = device.open() else { continue };
        let table = context.gid_table().iter().filter(|entry| entry.port_num == 1);
        let table: Vec<_> = table
            .map(|entry| {
                let gid = &entry.gid;
                let halves = u128::from(gid.subnet_prefix()) << 64 | u128::from(gid.interface_id());
                (entry.gid_index, halves.to_be_bytes())
            })
            .collect();
        let entries = port.gids.iter().map(|entry| (entry.index, entry.gid.bytes()));
        assert_eq!(entries.collect::<Vec<_>>(), table, "{name}");
    }
}
