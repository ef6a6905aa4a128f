"""Failure chains: every kind of line known, who came first, and nothing where nothing failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmctl.engine.records import Device, Process
from mmctl.engine.recovery.diagnose import diagnose, findings, knowledge
from mmctl.engine.recovery.logs import read_lines

GIB = 2**30

# One line of each kind, as drivers print it.
SAMPLES = """
aer_corrected       pcieport 0000:00:1c.4: AER: Multiple Corrected error received: 0000:00:1c.4
aer_corrected       pcieport 0000:00:03.1: PCIe Bus Error: severity=Correctable, type=Physical Layer
aer_fatal           pcieport 0000:40:01.1: AER: Uncorrectable (Fatal) error message received from 0000:41:00.0
aer_nonfatal        nvidia 0000:41:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer
completion_timeout  pcieport 0000:40:01.1:    [14] CmpltTO                (First)
link_down           pcieport 0000:40:01.1: pciehp: Slot(3): Link Down
link_down           PCI link down, initiating recovery
dpc                 pcieport 0000:40:01.1: DPC: containment event, status:0x1f01 source:0x0000
no_aer_handler      nvidia 0000:41:00.0: AER: can't recover (no error_detected callback)
recovery_failed     pcieport 0000:40:01.1: AER: device recovery failed
recovered           pcieport 0000:40:01.1: AER: device recovery successful
link_reset          pcieport 0000:00:03.0: AER: Root Port link has been reset (0)
device_inaccessible nvidia 0000:41:00.0: Unable to change power state from D3cold to D0, device inaccessible
hardware_error      {1}[Hardware Error]: event severity: fatal
memory_corrected    EDAC MC0: 4 CE error on CPU#0Channel#2_DIMM#0 (channel:2 slot:0 page:0x0)
memory_uncorrected  EDAC MC1: 1 UE memory read error on CPU_SrcID#0_MC#1_Chan#0_DIMM#0
xid79               NVRM: Xid (PCI:0000:44:00): 79, pid=0, GPU has fallen off the bus.
xid31               NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000
xid119              NVRM: Xid (PCI:0000:9b:00): 119, pid=4071838, name=python, Timeout after 45s of waiting for RPC response from GPU4 GSP!
xid149              NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000)
xid999              NVRM: Xid (PCI:0000:44:00): 999, something new
fallen_off_bus      NVRM: fallen off the bus and is not responding to commands.
reset_required      NVRM: nvAssertFailedNoLog: Assertion failed: Back to back GSP RPC timeout detected! GPU marked for reset @ kernel_gsp.c:2387
gsp_timeout         NVRM: GPU0 _kgspRpcRecvPoll: GSP RM heartbeat timed out
rm_init_failed      NVRM: GPU 0000:b3:00.0: RmInitAdapter failed! (0x23:0xffff:1426)
nvassert            NVRM: GPU0 nvAssertFailedNoLog: Assertion failed: 0 @ kernel_gsp.c:1446
sxid20034           nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
sxid12028           [ERROR] [tid 12727] detected NVSwitch non-fatal error 12028 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 61
nvlink_down         NVRM: knvlinkCoreShutdown: NVLink: link training failed on link 4
fabric_manager      nvidia-fabricmanager.service: Control process exited, code=exited, status=1/FAILURE
ring_timeout        [drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx_0.0.0 timeout, signaled seq=613206, emitted seq=613208
ring_reset_failed   amdgpu 0000:c5:00.0: amdgpu: Ring gfx_0.0.0 reset failed
mes_no_response     amdgpu 0000:03:00.0: amdgpu: MES failed to respond to msg=REMOVE_QUEUE
mes_no_response     [drm:mes_v11_0_submit_pkt_and_poll_completion.constprop.0 [amdgpu]] *ERROR* MES failed to response msg=3
smu_no_response     amdgpu 0000:0d:00.0: amdgpu: SMU: I'm not done with your previous command: SMN_C2PMSG_66:0x00000012
page_fault          amdgpu 0000:03:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:169 vmid:0 pasid:0)
evict_failed        amdgpu 0000:03:00.0: amdgpu: Failed to evict queue 5
suspend_failed      amdgpu: Failed to suspend process 0x8015
queue_removal_failed amdgpu: remove_all_kfd_queues_mes: Failed to remove queue 0 for dev 64667
gpu_reset           amdgpu 0000:c5:00.0: amdgpu: GPU reset begin!. Source:  3
gpu_reset           i915 0000:00:02.0: [drm] Resetting chip for GuC failed to reset engine mask=0x1
gpu_reset_failed    amdgpu 0000:c5:00.0: amdgpu: GPU reset end with ret = -62
vram_lost           amdgpu 0000:28:00.0: VRAM is lost due to GPU reset!
ras_error           amdgpu 0000:c5:00.0: amdgpu: 3 uncorrectable hardware errors detected in total in umc block
gpu_overheat        amdgpu 0000:c5:00.0: amdgpu: ERROR: GPU over temperature range(SW CTF) detected!
gpu_hang            i915 0000:00:02.0: [drm] GPU HANG: ecode 12:1:0020fffe, in app [1676]
gpu_hang            xe 0000:0b:00.0: [drm] Tile0: GT0: Timedout job: seqno=4294967169, lrc_seqno=4294967169, guc_id=5
engine_reset_failed i915 0000:00:02.0: [drm] *ERROR* rcs0 reset request timed out: {request: 00000001, RESET_CTL: 00000001}
engine_memory_error xe 0000:0b:00.0: [drm] Tile0: GT0: Engine memory CAT error [18]: class=ccs, logical_mask: 0x1
guc_failure         i915 0000:00:02.0: [drm] *ERROR* GT0: GUC: CT: dead or broken
npu_firmware        NPU firmware fatal, watchdog timeout
npu_firmware        habanalabs hl2: Failed to communicate with Device CPU (CPU-CP timeout)
npu_heartbeat       [ascend] [devmng] [devdrv_heartbeat 201] Device heartbeat lost. (dev_id=1)
npu_heartbeat       Device[1] lost heartbeat.[FUNC:SyncTask][FILE:engine.cc][LINE:407]
npu_device_abnormal [ascend] [drv_pcie] [devdrv_sync_non_trans_msg_send 1239] Device is abnormal. (dev_id=5; msg_type=3)
npu_message_failed  [ascend] [devdrv] [refresh 322] devdrv_manager_send_msg unsuccessful. (ret=-19; dev_id=5)
npu_command_failed  amdxdna 0000:c6:00.1: [drm] *ERROR* aie2_hwctx_init: Alloc hw resource failed, ret -22
npu_device_lost     Device_Absent/Abnormal(EL0001): Device not found or invalid.
memory_not_freed    GPU memory pool not freed in the reset handler
oom_killer          python3 invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0
process_killed      Memory cgroup out of memory: Killed process 1234 (python3) total-vm:1kB, anon-rss:1kB
nccl_timeout        [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)
nccl_error          node1:12:34 [0] NCCL WARN Cuda failure 'uncorrectable ECC error encountered'
ib_error            mlx5_core 0000:ab:00.0: poll_health:800: Fatal error 3 detected, device's health compromised
device_error        RuntimeError: CUDA error: an illegal memory access was encountered
process_crashed     Process 87058 (pt_main_thread) of user 0 terminated abnormally with signal 6/ABRT, processing...
cpu_stuck           watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [kworker/12:1:345]
kernel_trace        PC is at __do_softirq+0xc0/0x2f0
overheat            thermal thermal_zone0: critical temperature reached (105 C), shutting down
throttled           CPU3: Core temperature above threshold, cpu clock throttled (total events = 12)
"""  # noqa: E501

# What healthy machines print. None of it is a failure, most of it is not worth a note.
CLEAN = """
[    0.000000] Linux version 6.8.0 (gcc 13.2) #1 SMP PREEMPT_DYNAMIC
[    1.2] pcieport 0000:00:1c.4: AER: enabled with IRQ 24
[    1.3] pci 0000:00:01.0: [8086:6f04] type 01 class 0x060400 PCIe Root Port
[    2.1] ata1: SATA link down (SStatus 0 SControl 300)
[    2.5] e1000e 0000:00:1f.6 eth0: NIC Link is Down
[    2.6] mlx5_core 0000:ab:00.0: Port module event: module 0, Cable plugged
[    3.0] mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE
[    3.1] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build
[    3.2] nvidia-nvlink: Nvlink Core is being initialized, major device number 234
[    3.3] nvidia 0000:41:00.0: enabling device (0140 -> 0142)
[    3.4] [drm] Initialized amdgpu 3.57.0 for 0000:03:00.0 on minor 1
[    3.5] amdgpu 0000:03:00.0: amdgpu: SMU driver if version not matched
[    3.6] amdgpu 0000:03:00.0: amdgpu: SMU is initialized successfully!
[    3.7] amdgpu 0000:03:00.0: amdgpu: ring gfx_0.0.0 uses VM inv eng 0 on hub 0
[    3.8] i915 0000:00:02.0: [drm] GT0: GuC firmware i915/adlp_guc_70.bin version 70.5.1
[    3.9] i915 0000:00:02.0: [drm] GT0: GUC: submission enabled
[    4.0] habanalabs hl0: Successfully loaded firmware to device
[    4.1] thermal_sys: Registered thermal governor 'step_wise'
[    4.2] ACPI: thermal: Thermal Zone [TZ00] (28 C)
[    4.3] mce: CPU0: Thermal monitoring enabled (TM1)
[    4.4] EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0
[    4.5] rcu: Hierarchical RCU implementation.
[    5.0] audit: type=1400 apparmor="STATUS" operation="profile_load"
[   90.0] NVRM: Xid (PCI:0000:44:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)
"""  # noqa: E501


def chains(text: str) -> list[list[str]]:
    return [[link.what for link in chain.links] for chain in diagnose(text.splitlines()).chains]


def samples() -> list[tuple[str, str]]:
    return [(line.split()[0], line[20:].strip()) for line in SAMPLES.strip().splitlines()]


@pytest.mark.parametrize(("what", "line"), samples())
def test_each_kind_of_line_is_known(what: str, line: str) -> None:
    stamped = [f"[ 12.5] {line}", f"Sep 19 16:18:02 HOST kernel: [68183.6] {line}",
               f"3,4,206764307,-;{line}", f"2024-08-18T01:19:31.351160+00:00 h kernel: {line}",
               f"nov 07 01:36:56 HOST kernel: {line}", line]  # fmt: skip
    found = [[f.what for f in findings(read_lines([text]))] for text in stamped]
    assert found == [[what]] * len(stamped)


def test_every_entry_of_the_table_has_a_sample() -> None:
    sampled = {what.rstrip("0123456789") if "xid" in what else what for what, _ in samples()}
    for entry in knowledge().pattern:
        assert entry.what in sampled | {
            "engine_reset",
            "npu_memory_error",
            "peermem_invalid_context",
        }
        named = {*entry.consequence_of, *entry.same_as, *entry.resolves}
        known = {p.what for p in knowledge().pattern}
        assert all(name in known or name.startswith(("xid", "sxid")) for name in named)


def test_a_clean_log_gives_nothing() -> None:
    found = diagnose(CLEAN.splitlines())
    assert found.chains == () and found.leak is None
    assert {noted.what for noted in found.noted} <= {"xid154"}


def test_order_is_that_of_causes_within_one_burst() -> None:
    log = """
[  +0.000844] nvidia 0000:41:00.0: AER: can't recover (no error_detected callback)
[  +0.000001] pcieport 0000:40:01.1: AER: Uncorrected (Fatal) error received: 0000:40:01.1
[  +0.000001] NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.
[  +0.000001] NVRM: GPU 0000:41:00.0: GPU has fallen off the bus.
"""
    assert chains(log) == [["aer_fatal", "no_aer_handler", "xid79"]]


def test_dumps_between_the_lines_break_no_chain() -> None:
    log = """
[5.1] python3 invoked oom-killer: gfp_mask=0x140cca, order=0, oom_score_adj=0
[5.2] CPU: 3 PID: 999 Comm: python3 Not tainted 6.8.0
[5.2] Call Trace:
[5.2] RIP: 0033:0x7f1234567890
[5.3] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python3,pid=999
[5.4] Memory cgroup out of memory: Killed process 999 (python3) total-vm:100kB
"""
    assert chains(log) == [["oom_killer", "process_killed"]]
    log = """
[1.0] NVRM: nvAssertFailedNoLog: Assertion failed: GSP RPC timeout detected! GPU marked for reset
[1.1] NVRM: _issueRpcAndWait: rpcRecvPoll timedout for fn 76 sequence 4129!
[1.2] NVRM: Xid (PCI:0000:0b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (Reset)
[400.0] NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED]
"""
    assert chains(log) == [["gsp_timeout", "reset_required", "xid154"]]


def test_incidents_far_apart_are_two_chains_and_corrected_errors_elsewhere_join_none() -> None:
    log = """
[  100.0] NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=a, Ch 1, MMU Fault
[  101.0] pcieport 0000:00:1c.4: AER: Corrected error received: 0000:00:1c.4
[ 9000.0] NVRM: Xid (PCI:0000:42:00): 48, DBE
[ 9001.0] NVRM: Xid (PCI:0000:42:00): 63, Row Remapper: New row marked for remapping
[ 9002.0] NVRM: Xid (PCI:0000:42:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
"""  # noqa: E501
    assert chains(log) == [["xid31"], ["xid48", "xid63", "xid154"]]
    assert [noted.what for noted in diagnose(log.splitlines()).noted] == ["aer_corrected"]


def test_storms_and_resolved_errors_are_noted_and_no_failure() -> None:
    storm = [f"[{i}.0] pcieport 0000:00:03.1: AER: Corrected error received: 0000:00:00.0"
             for i in range(500)]  # fmt: skip
    found = diagnose(storm)
    assert found.chains == () and found.noted[0].count == 500
    resolved = """
[1.0] pcieport 0000:40:01.1: AER: Uncorrected (Non-Fatal) error received: 0000:41:00.0
[1.1] pcieport 0000:40:01.1: AER: device recovery successful
"""
    assert chains(resolved) == []
    nonfatal = "[1] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS\n"
    assert chains(nonfatal) == []
    assert chains(nonfatal.replace("Non-fatal", "Fatal")) == [["sxid28006"]]
    assert chains("NVRM: Xid (PCI:0000:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13") == []


def test_one_failure_on_eight_devices_is_one_link() -> None:
    log = "\n".join(f"[5.{i}] NVRM: Xid (PCI:0000:{i}0:00): 45, pid=1, Ch 1" for i in range(8))
    log = "[5.0] NVRM: Xid (PCI:0000:00:00): 74, NVLink: fatal error detected\n" + log
    (chain,) = diagnose(log.splitlines()).chains
    assert [link.what for link in chain.links] == ["xid74", "xid45"]
    assert chain.links[1].count == 8 and len(chain.links[1].devices) == 8


def test_the_published_chain_with_its_leak() -> None:
    log = """
[0.0] NPU firmware fatal, watchdog timeout
[1.0] PCI link down, initiating recovery
[2.0] GPU memory pool not freed in the reset handler
[3.0] gpu memory used: 1,248 MiB
[303.0] gpu memory used: 3,580 MiB
[603.0] gpu memory used: 5,912 MiB
"""
    found = diagnose(log.splitlines())
    (chain,) = found.chains
    assert [link.what for link in chain.links] == [
        "npu_firmware", "link_down", "memory_not_freed", "memory_held",
    ]  # fmt: skip
    assert chain.links[-1].line == 7 and "5,912" in chain.links[-1].evidence
    assert found.leak and found.leak.held_bytes == 5912 * 2**20
    assert found.leak.growth_bytes_per_minute == pytest.approx(466.4 * 2**20)
    assert 0 < chain.confidence_ratio < 1


def reading(at_s: float, used: int, *processes: Process) -> Device:
    return Device(
        ts_ns=round(at_s * 1e9), device="gpu0", kind="gpu", used_bytes=used, processes=processes
    )


def test_memory_that_no_process_holds_is_a_leak_and_memory_of_processes_is_none() -> None:
    worker = Process(pid=7, used_bytes=30 * GIB)
    healthy = [reading(i, 30 * GIB + 600 * 2**20, worker) for i in range(3)]
    assert diagnose([], healthy).leak is None
    held = diagnose([], [*healthy, reading(4, 30 * GIB)]).leak
    assert held and held.held_bytes == 30 * GIB and held.holder == "no process holds it"
    assert diagnose([], [reading(1, 600 * 2**20)]).leak is None
    growing = [reading(30 * i, (i + 31) * GIB, worker) for i in range(5)]
    leak = diagnose([], growing).leak
    assert leak and leak.growth_bytes_per_minute == pytest.approx(2 * GIB)
    unknown = [reading(1, 30 * GIB, Process(pid=7))]
    assert diagnose([], unknown).leak is None  # the shares are absent, not zero


def test_hostile_lines_are_cut_and_harmless() -> None:
    assert chains("NVRM: " * 100_000 + "\n" + "[" * 5000 + "\n" + '{"MESSAGE": 3}') == []
    assert chains('{"MESSAGE": "NVRM: Xid (PCI:0000:44:00): 79, off the bus"}') == [["xid79"]]


EXPECTED = {
    "k01": ["aer_corrected", "aer_fatal", "link_down", "no_aer_handler", "xid79"],
    "k05": ["aer_nonfatal", "completion_timeout", "no_aer_handler", "recovery_failed", "xid31"],
    "k07": ["xid31", "xid62", "xid45"],
    "k09": ["xid13", "xid109"],
    "k11": ["ring_timeout", "ring_reset_failed", "gpu_reset", "vram_lost"],
    "k15": ["kernel_trace", "npu_device_abnormal", "npu_message_failed"],
    "k17": ["reset_required"],
    "k19": None, "k22": None, "k24": None,
}  # fmt: skip


def test_real_logs(data: Path) -> None:
    for name, expected in EXPECTED.items():
        (path,) = (data / "kernel_logs").glob(f"{name}_*")
        found = chains(path.read_text("utf-8", errors="replace"))
        assert found == ([expected] if expected else []), name
    (k03,) = (data / "kernel_logs").glob("k03_*")
    assert chains(k03.read_text())[0][:2] == ["aer_fatal", "no_aer_handler"]
    (k13,) = (data / "kernel_logs").glob("k13_*")
    assert chains(k13.read_text())[0][:3] == ["ring_timeout", "gpu_reset", "evict_failed"]
