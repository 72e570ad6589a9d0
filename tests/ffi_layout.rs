//! The declarations of `src/sys/ibverbs` against the system's `infiniband/verbs.h`.
//!
//! `ffi/verbs_layout.c` prints what the header says; this test compiles it, runs it, and compares
//! every size, alignment, offset and constant by name, in both directions: what one side does not
//! know is as wrong as what the sides disagree on. The names that Rust declares are read from the
//! source, so that a new one cannot be forgotten here.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that meets the unexpected fails"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::io::Write;
use std::mem::{align_of, offset_of, size_of};
use std::path::Path;
use std::process::{Command, Stdio};

use kvrail::sys::ibverbs::*;

/// What a name is worth: size and alignment, offset and size, or a value.
type Layout = BTreeMap<String, Vec<i64>>;

/// Structures that newer libraries have made longer at their end. The functions that kvrail calls
/// write no more than the old length.
const GROWN: [&str; 1] = ["type ibv_port_attr"];

fn number(value: usize) -> i64 {
    i64::try_from(value).unwrap()
}

fn size_of_field<T, F>(_field: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! structs {
    ($into:ident: $($name:ident { $($field:ident),+ })+) => {$(
        $into.insert(
            concat!("type ", stringify!($name)).to_owned(),
            vec![number(size_of::<$name>()), number(align_of::<$name>())],
        );
        $($into.insert(
            field_name(stringify!($name), stringify!($field)),
            vec![
                number(offset_of!($name, $field)),
                number(size_of_field(|it: &$name| &it.$field)),
            ],
        );)+
    )+};
}

/// The type of an arm is given again, and checked by making a union of it: no arm can be borrowed
/// without unsafe code.
macro_rules! unions {
    ($into:ident: $($name:ident { $($field:ident: $kind:ty),+ })+) => {$(
        $into.insert(
            concat!("type ", stringify!($name)).to_owned(),
            vec![number(size_of::<$name>()), number(align_of::<$name>())],
        );
        $(
            let _same_type: fn($kind) -> $name = |$field| $name { $field };
            $into.insert(
                field_name(stringify!($name), stringify!($field)),
                vec![number(offset_of!($name, $field)), number(size_of::<$kind>())],
            );
        )+
    )+};
}

fn field_name(name: &str, field: &str) -> String {
    format!("field {name}.{}", field.trim_start_matches("r#"))
}

fn unions() -> Layout {
    let mut all = Layout::new();
    unions! { all:
                ibv_wr { rdma: ibv_wr_rdma, atomic: ibv_wr_atomic }
                ibv_async_element { cq: *mut ibv_cq, qp: *mut ibv_qp, srq: *mut c_void, wq: *mut
            c_void, port_num: c_int }
    }
    all
}

fn constants() -> Layout {
    let paths =
        [("IBV_SYSFS_NAME_MAX", IBV_SYSFS_NAME_MAX), ("IBV_SYSFS_PATH_MAX", IBV_SYSFS_PATH_MAX)]
            .map(|(name, value)| (name, number(value)));
    let all = constants::ALL.iter().copied().chain(paths);
    all.map(|(name, value)| (format!("constant {name}"), vec![value])).collect()
}

#[rustfmt::skip]
fn structs() -> Layout {
    let mut all = Layout::new();
    structs! { all:
                ibv_device { _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path
            }
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
                ibv_port_attr { state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags,
            max_msg_sz, bad_pkey_cntr, qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num,
            sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state,
            link_layer, flags, port_cap_flags2 }
                ibv_gid { raw }
                ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
                ibv_pd { context, handle }
                ibv_mr { context, pd, addr, length, handle, lkey, rkey }
                ibv_mw { context, pd, rkey, handle, r#type }
                ibv_mw_bind_info { mr, addr, length, mw_access_flags }
                ibv_mw_bind { wr_id, send_flags, bind_info }
                ibv_comp_channel { context, fd, refcnt }
                ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond,
            comp_events_completed, async_events_completed }
                ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state,
            qp_type, mutex, cond, events_completed }
                ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data
            }
                ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
                ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
                ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
                ibv_qp_attr { qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn,
            sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index,
            alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic,
            min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
            rate_limit }
                ibv_sge { addr, length, lkey }
                ibv_wr_rdma { remote_addr, rkey }
                ibv_wr_atomic { remote_addr, compare_add, swap, rkey }
                ibv_wr_bind_mw { mw, rkey, bind_info }
                ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr,
            remote_srqn, bind_mw }
                ibv_recv_wr { wr_id, next, sg_list, num_sge }
                ibv_wc { wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp,
            wc_flags, pkey_index, slid, sl, dlid_path_bits }
                ibv_async_event { element, event_type }
    }
    all
}

fn declared() -> Layout {
    structs().into_iter().chain(unions()).chain(constants()).collect()
}

/// The names of all structures, unions, fields and constants in the source.
fn named_in_source() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sys/ibverbs");
    let files = std::fs::read_dir(folder).unwrap();
    let texts = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    texts.flat_map(|text| names(&text)).collect()
}

fn names(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut inside: Option<&str> = None;
    for line in text.lines() {
        let words: Vec<&str> = line.split([' ', ':']).filter(|word| !word.is_empty()).collect();
        match words.as_slice() {
            ["pub", "struct" | "union", name, ..] if name.starts_with("ibv_") => {
                found.push(format!("type {name}"));
                inside = Some(name);
            }
            ["pub", "const", name, ..] | [name, "c_int" | "c_uint" | "u8" | "u32", "=", ..]
                if name.starts_with("IBV_") =>
            {
                found.push(format!("constant {name}"));
            }
            ["}", ..] if line == "}" => inside = None,
            ["pub", field, ..] => found.extend(inside.map(|name| field_name(name, field))),
            _other => {}
        }
    }
    found
}

/// What the C program prints.
fn parse(text: &str) -> Layout {
    let mut layout = Layout::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let values = words[2..].iter().map(|word| word.parse().unwrap()).collect();
        let twice = layout.insert(words[..2].join(" "), values);
        assert_eq!(twice, None, "{line} stands twice in ffi/verbs_layout.c");
    }
    layout
}

/// What differs between the declarations and the header.
fn differences(declared: &Layout, header: &Layout) -> Vec<String> {
    let names: BTreeSet<&String> = declared.keys().chain(header.keys()).collect();
    let difference = |name: &&String| match (declared.get(*name), header.get(*name)) {
        (Some(ours), Some(theirs)) if ours == theirs => None,
        (Some(ours), Some(theirs)) if GROWN.contains(&name.as_str()) && ours[0] <= theirs[0] => {
            None
        }
        (Some(ours), Some(theirs)) => {
            Some(format!("{name}: declared as {ours:?}, the header has {theirs:?}"))
        }
        (Some(_), None) => Some(format!("{name}: add it to ffi/verbs_layout.c")),
        (None, _) => Some(format!("{name}: ffi/verbs_layout.c proves what nothing declares")),
    };
    names.iter().filter_map(difference).collect()
}

/// Why the header cannot be asked here; `None` where it can.
fn missing() -> Option<String> {
    let probe = Command::new("cc")
        .args(["-E", "-x", "c", "-include", "infiniband/verbs.h", "/dev/null"])
        .stdin(Stdio::null())
        .output();
    match probe {
        Err(error) => Some(format!("there is no C compiler, cc: {error}")),
        Ok(output) if output.status.success() => None,
        Ok(_) => Some("there is no infiniband/verbs.h: apt-get install libibverbs-dev".to_owned()),
    }
}

/// Runs `ffi/verbs_layout.c`.
fn header() -> Layout {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("verbs_layout");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("ffi/verbs_layout.c");
    let compiled = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([&program, &source])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success());
    parse(&String::from_utf8(output.stdout).unwrap())
}

#[test]
#[expect(clippy::disallowed_methods, reason = "CI sets a variable; there nothing may be skipped")]
fn declarations_are_what_the_header_says() {
    if let Some(reason) = missing() {
        assert!(std::env::var_os("CI").is_none(), "{reason}");
        // Past the harness, which hides what a passing test prints.
        writeln!(std::io::stderr(), "SKIPPED declarations_are_what_the_header_says: {reason}")
            .unwrap();
        return;
    }
    let wrong = differences(&declared(), &header());
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn everything_that_is_declared_is_compared() {
    let here: BTreeSet<String> = declared().into_keys().collect();
    let source = named_in_source();
    assert!(source.len() > 300, "the source is not read: {source:?}");
    let forgotten: Vec<_> = source.symmetric_difference(&here).collect();
    assert!(forgotten.is_empty(), "tests/ffi_layout.rs and src/sys/ibverbs differ: {forgotten:?}");
}

#[test]
fn a_slip_on_either_side_is_found() {
    let of = |lines: &str| parse(lines);
    let good = of("type a 8 4\nfield a.b 0 4\nconstant C 3");
    assert_eq!(differences(&good, &good), [""; 0]);
    for slip in [
        "type a 12 4\nfield a.b 0 4\nconstant C 3",
        "type a 8 4\nfield a.b 4 4\nconstant C 3",
        "type a 8 4\nfield a.b 0 8\nconstant C 3",
        "type a 8 4\nfield a.b 0 4\nconstant C 4",
        "type a 8 4\nconstant C 3",
        "type a 8 4\nfield a.b 0 4\nfield a.c 4 4\nconstant C 3",
    ] {
        assert_eq!(differences(&good, &of(slip)).len(), 1, "{slip}");
        assert_eq!(differences(&of(slip), &good).len(), 1, "{slip}");
    }
    let grown = [of("type ibv_port_attr 52 4"), of("type ibv_port_attr 56 4")];
    assert_eq!(differences(&grown[0], &grown[1]), [""; 0]);
    assert_eq!(differences(&grown[1], &grown[0]).len(), 1, "the library would write too much");
}
