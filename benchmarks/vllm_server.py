"""A vLLM server for benchmarks and slow tests: a tiny random model, started, watched and stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_ADDED = re.compile(r"Added request (?:cmpl|chatcmpl)-(\S+?)-0\b")
_ITERATION = re.compile(r"Iteration\(\d+\): (\d+) context requests, \d+ context tokens, (\d+) generation")


def save_tiny_llama(folder: Path, width: int = 128) -> None:
    """
    Write a random Llama with a tokenizer of single bytes.

    Parameters
    ----------
    folder
        Takes the model.
    width
        Of its hidden states: 128 gives a million parameters, 512 some 20 million.
    """
    import tokenizers
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4 if width < 512 else 6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    levels = tokenizers.pre_tokenizers.ByteLevel
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *levels.alphabet()])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = levels(add_prefix_space=False)
    fast = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass(eq=False)
class VllmServer:
    """
    A server that serves while the ``with`` block runs.

    Parameters
    ----------
    program
        The ``vllm`` command.
    model
        Folder of a model.
    log
        Takes what it prints, one engine iteration a line among it.
    options
        Further words of ``vllm serve``.
    port
        It listens on; a free one by default.
    nice
        How far it gives way to other processes.
    """

    program: str
    model: Path
    log: Path
    options: Sequence[str] = ()
    port: int = 0
    nice: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _stream: IO[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGTERM)

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.port = self.port or free_port()
        words = [
            "nice",
            "-n",
            str(self.nice),
            self.program,
            "serve",
            str(self.model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        words += ["--enforce-eager", "--no-enable-prefix-caching", "--served-model-name", "tiny"]
        words += ["--enable-logging-iteration-details", "--max-model-len", "768", *self.options]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Lets it be paused; computes nothing otherwise.
        environment["VLLM_SERVER_DEV_MODE"] = "1"
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
        self._stream = self.log.open("ab")
        self._process = subprocess.Popen(
            words, stdout=self._stream, stderr=self._stream, env=environment, start_new_session=True
        )
        self._wait()

    def stop(self, how: signal.Signals) -> None:
        """End it with all its processes, and wait until they are gone."""
        if self._process is None or self._stream is None:
            return
        if how == signal.SIGTERM:
            self._process.terminate()
            self._process.wait(60)
        # Its workers die with it, whatever became of their parent.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        self._stream.close()
        self._process = None

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all its processes so far."""
        assert self._process is not None
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                # Its processes are a session of their own: the fourth field; then user and system time.
                ticks += (int(fields[11]) + int(fields[12])) * (int(fields[3]) == self._process.pid)
        return ticks / os.sysconf("SC_CLK_TCK")

    def iterations(self) -> int:
        """Return the iterations of its log so far that computed something."""
        text = self.log.read_text(errors="replace")
        return sum(int(chunks) + int(decodes) > 0 for chunks, decodes in _ITERATION.findall(text))

    def arrivals(self) -> list[str]:
        """Return the names of the requests as its engine got them, with ``--enable-log-requests``."""
        return _ADDED.findall(self.log.read_text(errors="replace"))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let it queue requests and compute nothing while the ``with`` block runs."""
        self.post("/pause?mode=keep", b"")
        try:
            yield
        finally:
            self.post("/resume", b"")

    def post(self, path: str, body: bytes) -> bytes:
        """Return what it answers."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with opener.open(request) as response:
            answer: bytes = response.read()
        return answer

    def _wait(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for _ in range(1200):
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"vllm ended: see {self.log}")
            try:
                opener.open(f"{self.url}/v1/models", timeout=5).close()
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise RuntimeError("vllm did not start")
