"""Starts vLLM twice (prefill, decode) and our gateway in front, and compares with the prefill server asked by itself."""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

START_LIMIT_S = 240
ANSWER_LIMIT_S = 60
COUNT_LIMIT_S = 10
MODEL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"]
TRANSFERS = "vllm:nixl_xfer_time_seconds_count"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as refusal:
        # Kept as it is: who waits for a start asks again.
        raise ConnectionError(f"{path} at port {port}: {refusal.code} {refusal.read().decode()}") from None


def until_up(name, port, path, process, log):
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"{name} ended with status {process.returncode}:\n{log.read_text()[-4000:]}")
        with contextlib.suppress(OSError):
            ask(port, path)
            return
        time.sleep(0.5)
    sys.exit(f"{name} was not up within {START_LIMIT_S} s:\n{log.read_text()[-4000:]}")


@contextlib.contextmanager
def running(name, command, log, **environment):
    """A process in a session of its own, which ends with all its children."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, env={**os.environ, **environment}
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def vllm(name, model, port, folder):
    command = [
        str(pathlib.Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--max-num-seqs", "4", "--no-enable-prefix-caching",
        "--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}),
    ]  # fmt: skip
    return running(
        name, command, folder / f"{name}.log",
        VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
        VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", UCX_TLS="tcp,self,sm",
        CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip


def text_of(streamed):
    events = [line[6:] for line in streamed.split("\n") if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        raise ValueError(f"a stream without [DONE]: {streamed[-300:]}")
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def requests():
    """Names, paths, bodies and what is compared of the answer."""
    common = {"model": "m", "temperature": 0, "ignore_eos": True, "max_tokens": 8}
    whole = lambda answer: [answer["choices"][0]["text"], answer["usage"]]
    for lines in (1, 3, 8):
        body = {**common, "prompt": "pack my box with five dozen liquor jugs " * lines}
        yield f"completion of {lines} lines", "/v1/completions", body, whole
    body = {**common, "prompt": "the quick brown fox jumps over the lazy dog " * 4}
    yield "prompt logprobs", "/v1/completions", {**body, "prompt_logprobs": 2}, lambda a: a["choices"][0]["prompt_logprobs"]
    yield "logprobs", "/v1/completions", {**body, "logprobs": 2}, lambda a: a["choices"][0]["logprobs"]
    chat = {**common, "messages": [{"role": "user", "content": "Tell me about the sea and the mountains."}]}
    yield "chat", "/v1/chat/completions", chat, lambda a: [a["choices"][0]["message"]["content"], a["usage"]]
    for name, path, streamed in (("completion", "/v1/completions", body), ("chat", "/v1/chat/completions", chat)):
        yield f"streamed {name}", path, {**streamed, "stream": True}, None


def answer_of(port, path, body, wanted):
    said = ask(port, path, body)
    return text_of(said) if wanted is None else wanted(json.loads(said))


def transfers(port):
    lines = [line for line in ask(port, "/metrics").split("\n") if line.startswith(TRANSFERS)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def differences(how, asked, expected, got):
    names = []
    for (name, *_), one, other in zip(asked, expected, got):
        if one != other:
            names.append(f"{how}: {name}")
            print(f"DIFFERENT  {names[-1]}\n  {one}\n  {other}")
    print(f"{how}: {len(asked) - len(names)} of {len(asked)} answers are those of one vLLM alone")
    return names


def counted(decode, before):
    """Whether a transfer was counted; vLLM does it when it looks for it next, after the answer."""
    deadline = time.monotonic() + COUNT_LIMIT_S
    while time.monotonic() < deadline:
        if transfers(decode) > before:
            return True
        time.sleep(0.2)
    return False


def compare(alone, gateway, decode):
    asked = list(requests())
    expected = [answer_of(alone, path, body, wanted) for _, path, body, wanted in asked]
    through = lambda request: answer_of(gateway, *request[1:])
    got, moved = [], []
    for request in asked:
        before = transfers(decode)
        got.append(through(request))
        moved.append(counted(decode, before))
    different = differences("one after another", asked, expected, got)
    without = [name for (name, *_), count in zip(asked, moved) if not count]
    print(f"a transfer of KV for each request, but for: {', '.join(without) or 'none'}")
    # For logprobs of the prompt vLLM computes the prompt anew.
    if without != ["prompt logprobs"]:
        different.append("transfers")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        different += differences("four at a time", asked, expected, list(pool.map(through, asked)))
    return different


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tandem", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        folder = pathlib.Path(folder)
        model = folder / "model"
        model.mkdir()
        # vLLM takes each *.safetensors for weights, so the reference numbers stay behind.
        for name in MODEL_FILES:
            shutil.copy(arguments.model / name, model)
        ports = {name: free_port() for name in ("prefill", "decode", "gateway")}
        started = {n: stack.enter_context(vllm(n, model, ports[n], folder)) for n in ("prefill", "decode")}
        for name, process in started.items():
            until_up(name, ports[name], "/health", process, folder / f"{name}.log")
        command = [
            str(arguments.tandem), "gateway", "--pd-backend", "vllm-nixl", "--host", "127.0.0.1", "--port", str(ports["gateway"]),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", "0", "--health-check-timeout-secs", "30",
            "--prefill", f"http://127.0.0.1:{ports['prefill']}", "--decode", f"http://127.0.0.1:{ports['decode']}",
        ]  # fmt: skip
        gateway = stack.enter_context(running("gateway", command, folder / "gateway.log"))
        until_up("gateway", ports["gateway"], "/readiness", gateway, folder / "gateway.log")
        different = compare(ports["prefill"], ports["gateway"], ports["decode"])
    print(f"different: {', '.join(different)}" if different else "all same")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
