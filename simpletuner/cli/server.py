"""`simpletuner server`: the web page."""

from __future__ import annotations

import os
import socket
import ssl as tls
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from uvicorn import Server
from uvicorn.supervisors import ChangeReload

from simpletuner.annexes.page.guard import Access, is_everywhere, is_own, page_token
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import Runs
from simpletuner.annexes.page.serve import listen, make_server, page_of_run
from simpletuner.errors import Interrupted, UserError
from simpletuner.redaction import hide
from simpletuner.reporting.events import EventStream

MAKE_PAIR = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=localhost -keyout key.pem -out "
    "cert.pem"
)
NO_ACCOUNTS = (
    "warning: other machines can reach this page. There are no accounts: anyone who has this "
    "address can read and change the project's files and start runs.{} Safer: listen on 127.0.0.1 "
    "and use `ssh -L {}:localhost:{}`."
)
PLAIN = " Without --ssl, traffic is readable on the network."
OPEN_TO_ALL = (
    "warning: --no-auth lets anyone who can reach {} use this page: they can read and change the "
    "project's files, and start runs, which can execute programs as you."
)
PORT = 8001
CALLBACK_PORT = 8002
LOOPBACK = "127.0.0.1"
app = typer.Typer()


@app.command()
def server(
    host: Annotated[str, typer.Option("--host", "-H", help="Address to listen on.")] = LOOPBACK,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="8001, or 8002 for callback.", max=65535)
    ] = None,
    mode: Annotated[
        Literal["unified", "trainer", "callback"],
        typer.Option(
            help="trainer: the page; callback: only receive events of remote runs; unified: both."
        ),
    ] = "unified",
    env: Annotated[
        str | None, typer.Option(help="Start the run of config/NAME/config.json at once.")
    ] = None,
    root: Annotated[
        list[Path] | None, typer.Option(help="Additional folder that the page may read and write.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the required token; created if missing.")
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Admit anyone who can reach the address.")
    ] = False,
    ssl: Annotated[
        bool, typer.Option("--ssl", help="Serve https with --ssl-key and --ssl-cert.")
    ] = False,
    ssl_key: Annotated[Path | None, typer.Option(help="Private key, a PEM file.")] = None,
    ssl_cert: Annotated[Path | None, typer.Option(help="Certificate, a PEM file.")] = None,
    ssl_no_verify: Annotated[
        bool, typer.Option("--ssl-no-verify", help="Webhooks accept any certificate.")
    ] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when the source changes.")
    ] = False,
) -> None:
    """Serve the web page of the project in this folder, on http://localhost:8001."""
    access = find_access(host, token_file, no_auth=no_auth)
    pair = certificate(ssl, ssl_key, ssl_cert)
    for path in root or []:
        if not path.is_dir():
            raise UserError(f"--root {path} is not a folder.")
    project = Project(Path.cwd().resolve(), tuple(path.resolve() for path in root or []))
    if ssl_no_verify:
        os.environ["SIMPLETUNER_SSL_NO_VERIFY"] = "true"  # runs inherit it
    page = make_server(project, access, mode, **pair, reload_dirs=[str(Path(__file__).parents[1])])
    if not port:
        port = CALLBACK_PORT if mode == "callback" else PORT
    # Binds the port first: a started run would outlive a server that fails to listen.
    with listen(host, port) as listener:
        if env is not None:
            typer.echo(f"Started {env}; its output is in {Runs(project).start(env, {}).folder}")
        announce(access, listener, secure=bool(pair))
        if reload:
            ChangeReload(page.config, target=page.run, sockets=[listener]).run()
        else:
            run_until_interrupted(page, listener)


def run_until_interrupted(page: Server, listener: socket.socket) -> None:
    """Serve until Ctrl-C, and then end the process at once."""
    try:
        page.run([listener])
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr, flush=True)
        # A normal exit would wait for threads that still handle requests. File writes are atomic.
        os._exit(Interrupted.exit_code)


class Page:
    """The page of a run, on a port of this machine, served by the process that opened it."""

    def __init__(self, port: int, *, no_auth: bool) -> None:
        self.port = port
        self.no_auth = no_auth
        self._opened: tuple[socket.socket, Access] | None = None

    def open(self) -> None:
        """Bind the port, so that one in use is reported before torch and the model are loaded.

        Raises:
            UserError: the port is in use.
        """
        access = find_access(LOOPBACK, token_file=None, no_auth=self.no_auth)
        self._opened = listen(LOOPBACK, self.port), replace(access, in_run=True)

    def serving(self, output_dir: Path, events: EventStream) -> AbstractContextManager[None]:
        """A context that serves the page of this output folder, if this process has opened it."""
        if self._opened is None:
            return nullcontext()
        listener, access = self._opened
        return page_of_run(listener, access, output_dir, events)


def find_access(host: str, token_file: Path | None, *, no_auth: bool) -> Access:
    """Who may use a page on this address.

    Token holders may, and the server's user where the system can identify them.

    Raises:
        UserError: the token cannot be read or created.
    """
    if no_auth:
        typer.secho(OPEN_TO_ALL.format(host), fg="red", err=True)
        return Access(host)
    token, source = page_token(token_file)
    hide(token)
    return Access(host, token, source)


def certificate(wanted: bool, key: Path | None, chain: Path | None) -> dict[str, str]:
    """uvicorn's options for https; empty for http.

    Raises:
        UserError: key or certificate is missing or unusable.
    """
    if not wanted and key is None and chain is None:
        return {}
    if key is None or chain is None:
        raise UserError(f"--ssl needs --ssl-key and --ssl-cert; to make a pair: {MAKE_PAIR}")
    try:
        # Loaded here, since uvicorn would fail with a traceback.
        tls.create_default_context(tls.Purpose.CLIENT_AUTH).load_cert_chain(chain, key)
    except OSError as error:
        raise UserError(
            f"--ssl-key {key} and --ssl-cert {chain} cannot be used: {error}."
        ) from None
    return {"ssl_keyfile": str(key), "ssl_certfile": str(chain)}


def announce(access: Access, listener: socket.socket, *, secure: bool) -> None:
    """Print the address of the page; the token, if required, is printed nowhere else."""
    port = listener.getsockname()[1]
    query = f"/?token={access.token}" if access.needs_token(listener) else ""
    if not is_own(access.host):
        note = "" if secure else PLAIN
        print(NO_ACCOUNTS.format(note, port, port), file=sys.stderr)
    scheme = "https" if secure else "http"
    typer.echo(f"{scheme}://{_browsable(access.host)}:{port}{query}")


def _browsable(host: str) -> str:
    """A listening address as a browser takes it, which cannot open a wildcard such as 0.0.0.0."""
    if is_own(host):
        return "localhost"
    name = socket.gethostname() if is_everywhere(host) else host
    return f"[{name}]" if ":" in name else name
