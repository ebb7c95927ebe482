"""The answers of environments in files, so that a step that is repeated after a crash has the same ones."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from srtrl.environments.base import Step
from srtrl.types import Completion


class Record:
    """Answers of environments in a file of JSON lines, written as they arrive."""

    def __init__(self, path: Path | None, rank: int = 0) -> None:
        """Read the files of all ranks; an unfinished last line is ignored. Without a path nothing is kept."""
        self._known: dict[str, Step] = {}
        self._file: IO[bytes] | None = None
        self._paths: set[Path] = set()
        if path is None:
            return
        path.parent.mkdir(exist_ok=True)
        own = path if rank == 0 else path.with_suffix(f".rank{rank}.jsonl")
        self._paths = {path, own, *path.parent.glob(f"{path.stem}.rank*.jsonl")}
        for other in self._paths - {own}:
            if other.exists():
                self._read(other, other.read_bytes())
        self._file = own.open("a+b", buffering=0)
        self._file.seek(0)
        self._file.truncate(self._read(own, self._file.read()))

    def _read(self, path: Path, content: bytes) -> int:
        """Add the answers of a file; returns the length of its finished lines."""
        complete = content.rpartition(b"\n")[0]
        for number, line in enumerate(complete.split(b"\n") if complete else (), start=1):
            try:
                row = json.loads(line)
                if row["crc32"] != checksum(row):
                    raise ValueError("its checksum differs")
                self._known[row["key"]] = Step(**row["step"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: damaged: expected an environment's answer ({error})") from error
        return len(complete) + 1 if complete else 0

    def find(self, completion: Completion) -> Step | None:
        """The answer to the same turn after the same tokens."""
        return self._known.get(digest_of(completion))

    def write(self, completion: Completion, step: Step) -> None:
        """Write an answer."""
        if self._file is not None:
            row = {"key": digest_of(completion), "step": asdict(step)}
            self._file.write(json.dumps(row | {"crc32": checksum(row)}).encode() + b"\n")

    def delete(self) -> None:
        """Delete the files of all ranks."""
        self.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def checksum(row: Mapping[str, Any]) -> int:
    """CRC-32 of a row's answer and its key."""
    return zlib.crc32(json.dumps([row["key"], row["step"]]).encode())


def key_of(completion: Completion) -> tuple[str, int, int]:
    """The key of the completion's sample."""
    request = completion.request
    return request.purpose, request.draw_index, request.sample_index


def digest_of(completion: Completion) -> str:
    """A hash of all tokens of a response up to a turn's end, and of the sample's key."""
    return hashlib.sha256(repr(key_of(completion)).encode() + completion.response.token_ids.tobytes()).hexdigest()[:32]
