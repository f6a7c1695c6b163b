# The words that people and CI use. `just` alone lists them; without just, each line works as it stands.

default:
    @just --list

# From a clone to a streamed answer
quickstart *arguments:
    deploy/quickstart {{arguments}}

# Format, lints, build and all tests
test *arguments:
    tests/run {{arguments}}

build:
    cargo build --release --locked --workspace --bins

# A fleet on this machine: just up 2p2d --port 30000
up *arguments: build
    cargo run --release --locked --bin tandem -- up {{arguments}}

fmt:
    cargo fmt --all

lint:
    cargo clippy --release --locked --workspace --all-targets -- -D warnings

# Licences, advisories, sources and duplicates of the dependencies (needs cargo-deny)
deny:
    cargo deny check

# A long run of a fuzz target: just fuzz handoff 600 (frames, greetings, tickets, answers, merges, settings, streams, gguf, safetensors, handoff)
fuzz target *arguments:
    cargo run --release --locked --bin tandem-fuzz -- {{target}} {{arguments}}

# A whole fleet under a virtual clock, seed by seed: just sim 20000, just sim 2000 --world hostile
sim seeds *arguments:
    cargo run --release --locked --bin tandem-sim -- --seeds {{seeds}} {{arguments}}

# What happened in one seed, with the flags of its run: just replay 17, just replay 17 --world hostile
replay seed *arguments:
    cargo run --release --locked --bin tandem-sim -- --replay {{seed}} {{arguments}}

# One transfer per reason to abort, step by step, with who holds which pages
lab:
    cargo run --release --locked --bin tandem-sim -- --lab

# Plants faults in the handoff, one at a time: the simulator must find each
sabotage:
    cargo nextest run --release --locked --workspace --features tandem-sim/sabotage --test sabotage --no-capture

# The conformance suite of a transfer backend, or some cases of it: just conformance tcp, just conformance shm CASE
conformance backend *cases:
    cargo run --release --locked --bin tandem-conformance -- {{backend}} {{cases}}

# Throughput of the transfer backends, as ratios to plain copies (and to Mooncake, which it fetches by pip)
transfer *arguments:
    cargo build --release --locked --bin transfer
    tests/bench/transfer {{arguments}}

# Our gateway before two real vLLM servers on the CPU, prefill and decode over NIXL (fetches 9 GB by pip, once)
vllm:
    cargo build --release --locked --bin tandem
    tests/compat/vllm/run

# From abort to quiet, for so many attempts in flight
abort-drain attempts="1000":
    cargo run --release --locked --bin abort_drain -- {{attempts}}

# Our gateway beside sglang-router, smg and vllm-router (which it fetches by pip), before instant mock workers
gateway-bench *arguments:
    cargo build --release --locked --bin tandem --bin gateway_bench
    tests/bench/gateway/compare {{arguments}}
