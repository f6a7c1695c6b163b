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

# A long run of a fuzz target: just fuzz handoff 600 (frames, greetings, tickets, streams, gguf, safetensors, handoff)
fuzz target *arguments:
    cargo run --release --locked --bin tandem-fuzz -- {{target}} {{arguments}}

# A whole fleet under a virtual clock, seed by seed: just sim 20000, just sim 1 --replay 17
sim seeds *arguments:
    cargo run --release --locked -p tandem-sim --bin tandem-sim -- --seeds {{seeds}} {{arguments}}
