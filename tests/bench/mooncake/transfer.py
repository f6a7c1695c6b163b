"""transfer.py POOL_MIB BLOCK_BYTES...: mooncake's TCP transport on loopback, one line of JSON per block size.

Two processes, each with a transfer engine and a pool of memory, find each other by the engine's P2P handshake. The
first writes all blocks of its pool into the second's, a batch of 64 MiB per call, for several rounds; the best round
counts. The bytes of the last round are compared.
"""

import ctypes
import json
import mmap
import multiprocessing
import sys
import time

from mooncake.engine import TransferEngine

BATCH_BYTES = 64 << 20
ROUNDS = 4
PATTERN = bytes(range(251))


def pool(size):
    memory = mmap.mmap(-1, size)
    memory[:] = bytes(size)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def engine(size):
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        sys.exit("mooncake's engine does not start")
    memory, base = pool(size)
    if engine.register_memory(base, size) != 0:
        sys.exit("mooncake's engine takes no memory")
    return engine, memory, base


def receive(size, pipe):
    receiver, memory, base = engine(size)
    pipe.send((receiver.get_rpc_port(), base))
    expected = (PATTERN * (size // len(PATTERN) + 1))[:size]
    pipe.recv()
    pipe.send(memory[:] == expected)
    pipe.recv()


def main():
    size = int(sys.argv[1]) << 20
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=receive, args=(size, theirs), daemon=True)
    peer.start()
    port, target = ours.recv()
    sender, memory, base = engine(size)
    memory[:] = (PATTERN * (size // len(PATTERN) + 1))[:size]
    for block in map(int, sys.argv[2:]):
        best = 0.0
        for _ in range(ROUNDS):
            start = time.monotonic()
            for at in range(0, size, BATCH_BYTES):
                offsets = range(at, min(at + BATCH_BYTES, size), block)
                lengths = [min(block, size - offset) for offset in offsets]
                code = sender.batch_transfer_sync_write(
                    f"127.0.0.1:{port}", [base + o for o in offsets], [target + o for o in offsets], lengths
                )
                if code != 0:
                    sys.exit(f"mooncake's transfer fails with {code}")
            best = max(best, size / (time.monotonic() - start))
        print(json.dumps({"block": block, "bytes_per_s": best}), flush=True)
    ours.send("compare")
    if not ours.recv():
        sys.exit("mooncake's transfer moved other bytes")
    ours.send("end")


if __name__ == "__main__":
    main()
