//! Benchmarks. Each is a program that prints one line of JSON; `compare` sets ours beside llama.cpp in one run.
