"""The gateways that are compared: how each is started, at its best sensible settings, and how it is known to serve.

All of them: two threads (one per core of this machine), picks in turn, health checks on, logs of errors only. Retries and
circuit breakers as each has them by default.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time

START_LIMIT_S = 60
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "gateway-bench id=0000000000 end "}], "max_tokens": 64}


class Refused(Exception):
    """Something that makes a result worthless, in words."""


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def urls(ports):
    return [f"http://127.0.0.1:{port}" for port in ports]


def tandem(paths, mocks, port, metrics):
    command = [paths["tandem"], "gateway", "--host", "127.0.0.1", "--prometheus-host", "127.0.0.1"]
    command += ["--port", port, "--prometheus-port", metrics, "--threads", "2"]
    command += ["--policy", "round_robin", "--log-level", "error", "--pd-disaggregation"]
    return command + workers(mocks)


def workers(mocks):
    prefill = [word for url in urls(mocks["prefill"]) for word in ("--prefill", url, "8998")]
    return prefill + [word for url in urls(mocks["decode"]) for word in ("--decode", url)]


def sglang_router(paths, mocks, port, metrics):
    command = [paths["python"], "-m", "sglang_router.launch_router", "--pd-disaggregation", *common(port, metrics)]
    return command + ["--log-level", "error"] + workers(mocks)


def smg(paths, mocks, port, metrics):
    command = [paths["smg"], "launch", "--pd-disaggregation", *common(port, metrics), "--log-level", "error"]
    return command + workers(mocks)


def vllm_router(paths, mocks, port, metrics):
    """Its only mode for P/D: P first, then D (the NIXL connector)."""
    command = [paths["python"], "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
    command += [*common(port, metrics), "--log-level", "error"]
    return command + workers(mocks)


def common(port, metrics):
    words = ["--host", "127.0.0.1", "--port", port, "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics]
    return words + ["--policy", "round_robin", "--worker-startup-check-interval", "1"]


# Name, how it is started, how it ties both legs.
SYSTEMS = {
    "direct": (None, "direct"),
    "tandem": (tandem, "rooms"),
    "sglang-router": (sglang_router, "rooms"),
    "smg": (smg, "rooms"),
    "vllm-router": (vllm_router, "transfers"),
}


class Mocks:
    """The mock workers of a fleet, one process."""

    def __init__(self, paths, pairs):
        self.process = subprocess.Popen([paths["bench"], "mock", str(pairs)], stdout=subprocess.PIPE, text=True)
        self.ports = json.loads(self.process.stdout.readline())

    @property
    def pid(self):
        return self.process.pid

    def stop(self):
        self.process.kill()
        self.process.wait()


class Gateway:
    """A gateway that serves; `None` as pid where there is none, and requests go to D."""

    def __init__(self, name, paths, mocks, log):
        start, self.fleet = SYSTEMS[name]
        self.name, self.process, self.usage = name, None, None
        if start is None:
            self.port = mocks.ports["decode"][0]
            return
        self.port, metrics = free_ports(2)
        command = [str(word) for word in start(paths, mocks.ports, self.port, metrics)]
        with open(log, "ab") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            self.wait_until_it_serves()
        except Refused as why:
            self.stop()
            raise Refused(f"{why}; its log is {log}") from None

    @property
    def pid(self):
        return self.process and self.process.pid

    def wait_until_it_serves(self):
        deadline = time.monotonic() + START_LIMIT_S
        last = "nobody listens"
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise Refused(f"{self.name} ended with {self.process.returncode} at its start")
            try:
                status, text = chat(self.port)
                if status == 200:
                    return
                last = f"{status} {text[:200]}"
            except OSError as error:
                last = str(error)
            time.sleep(0.05)
        raise Refused(f"{self.name} does not serve within {START_LIMIT_S} s: {last}")

    def stop(self):
        """Ends it and keeps what it used in all, from wait4."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGKILL)
        _, status, self.usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)


def chat(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def peers(root, cache):
    """The venv with the other gateways, made once per list of requirements."""
    import hashlib

    requirements = os.path.join(root, "requirements.txt")
    with open(requirements, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()[:16]
    venv = os.path.join(cache, f"gateways-{digest}")
    if not os.path.exists(os.path.join(venv, "complete")):
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        pip = [os.path.join(venv, "bin", "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--disable-pip-version-check", "--requirement", requirements], check=True)
        open(os.path.join(venv, "complete"), "w").close()
    return {"python": os.path.join(venv, "bin", "python"), "smg": os.path.join(venv, "bin", "smg")}
