"""READs of a batch of blocks by NIXL between two processes of this host; prints MB/s.

    python nixl_read.py BLOCK_BYTES BATCH SECONDS
"""

import multiprocessing
import os
import sys
import time

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config

POOL = 128 << 20


def agent(name):
    """An agent with its memory, and the memory's registration."""
    made = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = numpy.full(POOL, 7, dtype=numpy.uint8)
    made.register_memory([(memory.ctypes.data, POOL, 0, "")], "DRAM")
    return made, memory


def hold(pipe):
    """The end that is read from."""
    made, memory = agent("holder")
    pipe.send((made.get_agent_metadata(), memory.ctypes.data))
    while not pipe.poll(0.001):
        # Where the network has no READs, the holder's own progress answers them.
        made.get_new_notifs()


def main():
    size, batch, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    pipe, other = multiprocessing.Pipe()
    holder = multiprocessing.Process(target=hold, args=(other,), daemon=True)
    holder.start()
    metadata, remote_base = pipe.recv()
    made, memory = agent("reader")
    peer = made.add_remote_agent(metadata)

    def request(first):
        """A transfer of the blocks from this one on."""
        offsets = [(first + at) % (POOL // size) * size for at in range(batch)]
        local = made.get_xfer_descs([(memory.ctypes.data + at, size, 0) for at in offsets], "DRAM")
        remote = made.get_xfer_descs([(remote_base + at, size, 0) for at in offsets], "DRAM")
        return made.initialize_xfer("READ", local, remote, peer, b"")

    # Prepared once: only transfers are timed.
    requests = [request(number * batch) for number in range(8)]

    def read(handle):
        state = made.transfer(handle)
        while state == "PROC":
            state = made.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")

    read(requests[0])
    blocks, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        for handle in requests:
            read(handle)
            blocks += batch
    elapsed = time.monotonic() - start
    print(f"{blocks * size / elapsed / 1e6:.1f}", flush=True)
    holder.kill()
    # The agents' own end may crash.
    os._exit(0)


main()
