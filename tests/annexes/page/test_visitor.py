"""Whose a connection is, from tables that Linux wrote, and the token of everybody else."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from simpletuner.annexes.page import guard
from simpletuner.annexes.page.guard import (
    VARIABLE,
    is_own_user,
    page_token,
    reports_users,
    socket_user,
)
from simpletuner.errors import UserError

SERVER = ("127.0.0.1", 0xA611)
HEAD = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  "
    "timeout inode\n"
)
QUEUES = "00000000:00000000 00:00000000 00000000"
# Of a server on 127.0.0.1:42513: its own socket, its ends of connections, and the clients' ends.
TCP = f"""{HEAD}
   1: 0100007F:A611 00000000:0000 0A {QUEUES}  1000        0 20742 1 000000001ba1 100 0 0 10 0
   2: 0100007F:A611 0100007F:B718 01 {QUEUES}  1000        0 20744 1 00000000e351 20 4 30 10 -1
   3: 0100007F:B718 0100007F:A611 01 {QUEUES}  1001        0 20743 2 00000000a5e3 20 4 0 10 -1
   4: 0100007F:B719 0100007F:A611 01 {QUEUES}  1000        0 20745 2 00000000a5e4 20 4 0 10 -1
   5: 0100007F:B71A 0100007F:A611 01 {QUEUES}     0        0 20746 2 00000000a5e5 20 4 0 10 -1
   6: 0100007F:B71B 0100007F:A611 05 {QUEUES}     0        0 0 3 00000000a5e6
   7: 0100007F:B71C 0100007F:A612 01 {QUEUES}  1000        0 20747 2 00000000a5e7 20 4 0 10 -1
   8: 0100007F:B71D 0100007F:A611 01 {QUEUES} 65534        0 20748 2 00000000a5e8 20 4 0 10 -1
""".replace("\n\n", "\n")
LOOPBACK = "00000000000000000000000001000000"  # ::1
MAPPED = "0000000000000000FFFF00000100007F"  # ::ffff:127.0.0.1
TCP6 = f"""{HEAD}
   0: {MAPPED}:B724 {MAPPED}:A611 01 {QUEUES}  1001        0 20745 2 0
   1: {LOOPBACK}:B725 {LOOPBACK}:A611 01 {QUEUES}  1000        0 20749 2 0
""".replace("\n\n", "\n")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of another day, for a server of user 1000."""
    for name, text in (("tcp", TCP), ("tcp6", TCP6)):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(guard, "TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("client", "server", "user", "own"),
    [
        pytest.param(("127.0.0.1", 0xB718), SERVER, 1001, False, id="another user"),
        pytest.param(("127.0.0.1", 0xB719), SERVER, 1000, True, id="the same user"),
        pytest.param(("127.0.0.1", 0xB71A), SERVER, 0, True, id="root, or a relay of WSL"),
        pytest.param(
            ("127.0.0.1", 0xB71B), SERVER, None, False, id="closed at once, which looks like root's"
        ),
        pytest.param(
            ("127.0.0.1", 0xB71C), SERVER, None, False, id="a connection to another server"
        ),
        pytest.param(
            ("127.0.0.1", 0xB71D),
            SERVER,
            65534,
            False,
            id="a user that this container does not know",
        ),
        pytest.param(
            ("127.0.0.1", 0xB724), SERVER, 1001, False, id="IPv4 through a socket of IPv6"
        ),
        pytest.param(("::1", 0xB725), ("::1", 0xA611), 1000, True, id="IPv6"),
        pytest.param(
            ("::ffff:127.0.0.1", 0xB719),
            ("::ffff:127.0.0.1", 0xA611),
            1000,
            True,
            id="seen as IPv6",
        ),
        pytest.param(
            ("172.17.0.1", 0xB719),
            ("172.17.0.2", 0xA611),
            None,
            False,
            id="from outside a container",
        ),
    ],
)
def test_user_of_a_connection(
    client: guard.End, server: guard.End, user: int | None, own: bool
) -> None:
    assert socket_user(client, server) == user
    assert is_own_user(client, server) is own


@pytest.mark.usefixtures("recorded")
def test_nobody_is_not_accepted_as_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this user must not take everybody whom its container does not know for itself."""
    monkeypatch.setattr(os, "geteuid", lambda: guard.NOBODY)
    assert not is_own_user(("127.0.0.1", 0xB71D), SERVER)
    assert is_own_user(("127.0.0.1", 0xB71A), SERVER)


def test_users_are_unknown_without_socket_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert reports_users(listener) is guard.TABLES[0].exists()
        monkeypatch.setattr(guard, "TABLES", (tmp_path / "tcp",))
        assert not reports_users(listener)


def test_token_is_created_once_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    token, source = page_token(None)
    assert source == str(tmp_path / "simpletuner" / "page-token")
    assert stat.S_IMODE(Path(source).stat().st_mode) == 0o600
    assert len(token) == 43
    assert page_token(None) == (token, source)
    monkeypatch.setenv(VARIABLE, "of-the-environment")
    assert page_token(None) == ("of-the-environment", VARIABLE)
    assert page_token(Path(source)) == (token, source), "the command line is stronger"


def test_servers_started_together_share_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comes while the other makes its token."""
    file = tmp_path / "state" / "token"
    make = guard.secrets.token_urlsafe
    found: list[str] = []

    def slowly(size: int) -> str:
        monkeypatch.setattr(guard.secrets, "token_urlsafe", make)
        found.append(page_token(file)[0])
        return make(size)

    monkeypatch.setattr(guard.secrets, "token_urlsafe", slowly)
    found.append(page_token(file)[0])
    assert found[0] == found[1] == file.read_text()
    assert [path.name for path in file.parent.iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("x" * 43, 0o644, "chmod 600"),
        ("short", 0o600, "at least 16"),
        ("x" * 20 + "ü", 0o600, "letters, digits"),
    ],
)
def test_unusable_token_is_refused(text: str, mode: int, words: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(UserError, match=words):
        page_token(file)
    with pytest.raises(UserError, match=f"--token-file, or set {VARIABLE}"):
        page_token(file / "below-a-file")
