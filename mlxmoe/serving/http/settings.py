"""What the operator of a server decides: where it listens, whom it answers, and its limits. Knows no HTTP."""

from __future__ import annotations

import ipaddress
import math
import socket
from dataclasses import dataclass, fields

from mlxmoe.errors import RequestError

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MOST_CHOICES = 8  # of one request: what the schema of a request says, too
KEY_LENGTH = 8


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Raises RequestError for a value that makes no sense.

    `host`, `port`: where the server listens; port 0 takes a free one. `api_keys`: any of them opens the API; empty:
    nobody is asked for one. `allowed_origins`: web pages of other servers that may ask, as "https://chat.example";
    "*" is every page. `allowed_hosts`: names besides the local ones and the bound address under which it may be
    asked, against DNS rebinding; "*" is every name. `max_body_bytes`: of a request. `request_s`: seconds from a
    request to its last token. `idle_s`: seconds that a client may let the server wait, while sending a request or
    reading a reply. `patience_s`: seconds that a stream waits for its turn before it begins with comments.
    `comment_s`: seconds between such comments. `drain_s`: seconds that replies under way have to end when the
    server does. `max_n`: replies that one request may ask for.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 2 * 2**20
    request_s: float = 1800.0
    idle_s: float = 60.0
    patience_s: float = 2.0
    comment_s: float = 5.0
    drain_s: float = 60.0
    max_n: int = MOST_CHOICES

    def __post_init__(self) -> None:
        for name in ("api_keys", "allowed_origins", "allowed_hosts"):
            value = getattr(self, name)
            fits = isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
            _demand(fits, name, "a tuple of strings that are not empty")
        _demand(isinstance(self.host, str) and self.host.strip() == self.host != "", "host", "a name or an address")
        _demand(_whole(self.port) and 0 <= self.port <= 65535, "port", f"from 0 to 65535, not {self.port!r}")
        for key in self.api_keys:  # the key itself is never said
            fits = len(key) >= KEY_LENGTH and key.isascii() and key.isprintable() and " " not in key
            _demand(fits, "api_keys", f"keys of {KEY_LENGTH} or more ASCII characters without spaces")
        for origin in self.allowed_origins:
            scheme, _, rest = origin.partition("://")
            fits = origin == "*" or (scheme in ("http", "https") and bool(rest) and "/" not in rest)
            _demand(fits, "allowed_origins", f"as 'https://chat.example', without a path, not {origin!r}")
        for host in self.allowed_hosts:
            _demand("/" not in host, "allowed_hosts", f"names or addresses as 'mini.local', not {host!r}")
        _demand(_whole(self.max_body_bytes) and self.max_body_bytes >= 1024, "max_body_bytes", "1024 or more")
        for field in fields(self):
            if field.name.endswith("_s"):
                seconds = getattr(self, field.name)
                fits = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < math.inf
                _demand(fits, field.name, f"seconds, more than 0, not {seconds!r}")
        _demand(_whole(self.max_n) and 1 <= self.max_n <= MOST_CHOICES, "max_n", f"from 1 to {MOST_CHOICES}")

    def answers_to(self, name: str) -> bool:
        """Whether a request for this host may be answered. `name`: lower case, without a port and brackets.

        A server that listens everywhere also answers to any address, and to the machine's own name: rebinding needs
        a name that the attacker has registered.
        """
        if "*" in self.allowed_hosts or name in LOCAL_NAMES or name == bare_host(self.host):
            return True
        if name in {bare_host(host) for host in self.allowed_hosts}:
            return True
        return self._everywhere and (_is_address(name) or name in _own_names())

    @property
    def _everywhere(self) -> bool:
        return self.host in ("0.0.0.0", "::")


def bare_host(text: str) -> str:
    """The host of `name`, `name:port`, `[v6]:port` or `v6`: lower case, without port, brackets and a last dot."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name = text if text.count(":") > 1 else text.partition(":")[0]
    return name.removesuffix(".")


def _own_names() -> set[str]:
    name = socket.gethostname().lower().partition(".")[0]
    return {name, f"{name}.local", socket.gethostname().lower()}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _demand(fits: bool, name: str, wanted: str) -> None:
    if not fits:
        raise RequestError(f"The server's {name} must be {wanted}.")
