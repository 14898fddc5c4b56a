"""`simpletuner server`: the web page."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from simpletuner.errors import Interrupted, UserError
from simpletuner.redaction import hide

if TYPE_CHECKING:
    from uvicorn import Server

    from simpletuner.annexes.page.guard import Access
    from simpletuner.reporting.events import EventStream

    ServePage = Callable[[Path, EventStream], AbstractContextManager[None]]

MAKE_PAIR = "openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=localhost -keyout key.pem -out cert.pem"
NO_ACCOUNTS = (
    "warning: other machines can reach this page. There are no accounts: anyone who has this address can read and "
    "change the project's files and start runs.{} Safer: listen on 127.0.0.1 and use `ssh -L {}:localhost:{}`."
)
PLAIN = " Without --ssl, traffic is readable on the network."
OPEN_TO_ALL = (
    "warning: --no-auth lets anyone who can reach {} use this page: they can read and change the project's files, and "
    "start runs, which can execute programs as you."
)
PORT, CALLBACK_PORT = 8001, 8002
LOOPBACK = "127.0.0.1"


def server(
    host: Annotated[str, typer.Option("--host", "-H", help="Address to listen on.")] = LOOPBACK,
    port: Annotated[int | None, typer.Option("--port", "-p", help="8001, or 8002 for callback.", max=65535)] = None,
    mode: Annotated[
        Literal["unified", "trainer", "callback"],
        typer.Option(help="trainer: the page; callback: only receive events of remote runs; unified: both."),
    ] = "unified",
    env: Annotated[str | None, typer.Option(help="Start the run of config/NAME/config.json at once.")] = None,
    root: Annotated[list[Path] | None, typer.Option(help="Additional folder that the page may read and write.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the required token; created if missing.")] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Admit anyone who can reach the address.")] = False,
    ssl: Annotated[bool, typer.Option("--ssl", help="Serve https with --ssl-key and --ssl-cert.")] = False,
    ssl_key: Annotated[Path | None, typer.Option(help="Private key, a PEM file.")] = None,
    ssl_cert: Annotated[Path | None, typer.Option(help="Certificate, a PEM file.")] = None,
    ssl_no_verify: Annotated[bool, typer.Option("--ssl-no-verify", help="Webhooks accept any certificate.")] = False,
    reload: Annotated[bool, typer.Option("--reload", help="Restart when the source changes.")] = False,
) -> None:
    """Serve the web page of the project in this folder, on http://localhost:8001."""
    from uvicorn.supervisors import ChangeReload

    from simpletuner.annexes.page.control import Runs
    from simpletuner.annexes.page.project import Project
    from simpletuner.annexes.page.serve import listen, make_server

    access, pair = find_access(host, token_file, no_auth=no_auth), certificate(ssl, ssl_key, ssl_cert)
    if missing := [path for path in root or [] if not path.is_dir()]:
        raise UserError(f"--root {missing[0]} is not a folder.")
    project = Project(Path.cwd().resolve(), tuple(path.resolve() for path in root or []))
    if ssl_no_verify:
        os.environ["SIMPLETUNER_SSL_NO_VERIFY"] = "true"  # runs inherit it
    page = make_server(project, access, mode, **pair, reload_dirs=[str(Path(__file__).parents[1])])
    # Binds the port first: a started run would outlive a server that fails to listen.
    with listen(host, port or (CALLBACK_PORT if mode == "callback" else PORT)) as listener:
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


def open_page(port: int, *, no_auth: bool) -> ServePage:
    """Bind a port for the page of a run; the returned function serves it, given the output folder and the events.

    Raises:
        UserError: the port is in use.
    """
    from simpletuner.annexes.page.serve import listen, page_of_run

    access = replace(find_access(LOOPBACK, None, no_auth=no_auth), in_run=True)
    # Bound now, so that a port in use is reported before torch and the model are loaded.
    return partial(page_of_run, listen(LOOPBACK, port), access)


def find_access(host: str, token_file: Path | None, *, no_auth: bool) -> Access:
    """Who may use a page on this address: token holders, and the server's user where the system can identify them.

    Raises:
        UserError: the token cannot be read or created.
    """
    from simpletuner.annexes.page.guard import Access, page_token

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
    import ssl

    if not wanted and key is None and chain is None:
        return {}
    if key is None or chain is None:
        raise UserError(f"--ssl needs --ssl-key and --ssl-cert; to make a pair: {MAKE_PAIR}")
    try:
        # Loaded here, since uvicorn would fail with a traceback.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(chain, key)
    except OSError as error:
        raise UserError(f"--ssl-key {key} and --ssl-cert {chain} cannot be used: {error}.") from None
    return {"ssl_keyfile": str(key), "ssl_certfile": str(chain)}


def announce(access: Access, listener: socket.socket, *, secure: bool) -> None:
    """Print the address of the page, with the token if it is required; the token is printed nowhere else."""
    from simpletuner.annexes.page.guard import is_everywhere, is_own

    port = listener.getsockname()[1]
    # A browser cannot open a wildcard address such as 0.0.0.0.
    name = "localhost" if is_own(access.host) else socket.gethostname() if is_everywhere(access.host) else access.host
    query = f"/?token={access.token}" if access.needs_token(listener) else ""
    if not is_own(access.host):
        print(NO_ACCOUNTS.format("" if secure else PLAIN, port, port), file=sys.stderr)
    typer.echo(f"{'https' if secure else 'http'}://{f'[{name}]' if ':' in name else name}:{port}{query}")
