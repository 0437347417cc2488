"""HTTP admin API of the control process: list, load, unload, add, drop and switch models.

Listens on a Unix socket and optionally on a loopback port, never on the clients' port. No route
accepts an address.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from store.reference import is_reference
from transport.control_protocol import ModelState
from triolet.config import SEPARATOR, FleetModelConfig, require_adapter_names
from triolet.errors import AuditLogError, ConfigError

from ..audit.events import AuditOutcome, os_user
from ..rollouts.rollout import RolloutRefused
from ..settings.conversion import converted
from ..settings.form import require_model_name
from .auditing import AUDITED, audit
from .control import new_id
from .operations import (
    AdapterOrder,
    Conflict,
    NoRoom,
    Operation,
    OperationStatus,
    SwitchOrder,
    UnknownAdapter,
    UnknownModel,
    UnknownRollout,
    WantedState,
)
from .residency import HOST, held_bytes
from .rollout_admin import rollout_routes
from .sockets import bind_port, bind_private

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from .control import Control
    from .models import Model
    from .worker_seconds import Version

log = structlog.get_logger(__name__)

MAX_BODY_BYTES: Final = 64 * 1024
"""Bodies contain only names and settings of models."""
ACTIONS: Final = {
    "load": WantedState.LOAD,
    "wake": WantedState.LOAD,
    "sleep": WantedState.SLEEP,
    "unload": WantedState.UNLOAD,
}
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Accepted Host headers. A web page may send requests to a local port (DNS rebinding), but not with
these hosts, and browsers mark its requests with Origin or Sec-Fetch-Site."""
LLAMA_STATUS: Final = {
    ModelState.ABSENT: "unloaded",
    ModelState.STAGED: "unloaded",
    ModelState.LOADING: "loading",
    ModelState.WARM: "loaded",
    ModelState.SERVING: "loaded",
    ModelState.SLEEPING: "sleeping",
    ModelState.DRAINING: "unloaded",
}
"""State names of llama.cpp's router."""


class AdminRefusal(Exception):
    """A refused request; becomes an error response with the reason.

    Attributes:
      status: HTTP status.
      code: error code for programs.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


async def serve_admin(
    control: Control,
    path: Path,
    port: int | None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the admin API until cancelled.

    Args:
      control: the control to operate.
      path: path of the Unix socket.
      port: port on 127.0.0.1, or None.
      task_status: started once it listens.

    Raises:
      ConfigError: cannot listen on the socket or the port.
    """
    listening = [(bind_private(path), os_user())]
    if port is not None:
        listening.append((bind_port(port), f"port:{port}"))
    async with trio.open_nursery() as nursery:
        for bound, actor in listening:
            await nursery.start(partial(_serve, build_app(control, actor), bound))
        task_status.started()


async def _serve(app: QuartTrio, bound: socket.socket, task_status: trio.TaskStatus[Any]) -> None:
    config = Config()
    config.bind = [f"fd://{bound.detach()}"]
    config.errorlog = None  # the application logs errors
    await serve(app, config, task_status=task_status)


def build_app(control: Control, actor: str) -> QuartTrio:
    """Return the application of one listener.

    Args:
      control: the control to operate.
      actor: actor of its requests in operations and the audit log.
    """
    app = QuartTrio("triolet_admin", static_folder=None, template_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.config["PROPAGATE_EXCEPTIONS"] = False
    routes: tuple[tuple[str, str, Callable[..., Awaitable[Response]]], ...] = (
        ("GET", "/admin/models", partial(_list_models, control)),
        ("POST", "/admin/models", partial(_add, control, actor)),
        ("DELETE", "/admin/models/<name>", partial(_drop, control, actor)),
        ("POST", "/admin/models/<name>/<action>", partial(_order, control, actor)),
        ("POST", "/admin/models/<name>/switch", partial(_switch, control, actor)),
        ("POST", "/admin/models/<name>/adapters", partial(_load_adapter, control, actor)),
        (
            "DELETE",
            "/admin/models/<name>/adapters/<adapter>",
            partial(_unload_adapter, control, actor),
        ),
        ("POST", "/v1/load_lora_adapter", partial(_load_as_vllm, control, actor)),
        ("POST", "/v1/unload_lora_adapter", partial(_unload_as_vllm, control, actor)),
        ("GET", "/admin/operations/<operation_id>", partial(_show_operation, control)),
        *rollout_routes(control, actor, _require_references),
        ("GET", "/models", partial(_list_as_llama, control)),
        ("POST", "/models/<action>", partial(_order_as_llama, control, actor)),
    )
    for method, path, view in routes:
        app.add_url_rule(path, endpoint=f"{method} {path}", view_func=view, methods=[method])
    app.before_request(_refuse_pages)
    app.register_error_handler(Exception, _on_error)
    return app


async def _refuse_pages() -> None:
    """Refuse requests that a web page may have sent.

    Raises:
      AdminRefusal: 403.
    """
    name = request.host.rsplit(":", 1)[0] if request.host[-1:] != "]" else request.host
    # A browser may omit Origin, but then it still sends Sec-Fetch-Site.
    is_browser = "origin" in request.headers or "sec-fetch-site" in request.headers
    if is_browser or name not in LOCAL_NAMES:
        raise AdminRefusal(
            403, "not_local", "web pages must not use the admin API; use curl or `triolet model`"
        )


async def _list_models(control: Control) -> Response:
    now = trio.current_time()
    residents = control.controller.outlook.residents(now)
    news = {one.name: one.predicted_ready_s for one in control.news()}
    seconds = control.account.seconds()
    shown = {
        "budget_bytes": control.controller.budgets[HOST],
        "held_bytes": held_bytes(residents),
        "gpus": [
            {"gpu": place, "budget_bytes": budget, "held_bytes": held_bytes(residents, place)}
            for place, budget in control.controller.budgets.items()
            if place != HOST
        ],
        "models": [
            _shown_model(model, now, news[name], seconds)
            | {"public_name": control.changes.switches.public_name_of(name)}
            for name, model in control.controller.models.items()
        ],
    }
    return _json(shown)


def _shown_model(
    model: Model,
    now: float,
    predicted_ready_s: float | None,
    seconds: Mapping[Version, float],
) -> dict[str, Any]:
    config = model.config
    used_s = now - model.last_used_at
    versions = {digest: s for (name, digest), s in seconds.items() if name == config.name}
    return {
        "name": config.name,
        "digest": config.digest,
        "adapters": dict(config.adapters),
        "state": model.state,
        "pinned": config.pinned,
        "keep_alive_s": config.keep_alive_s,
        "bytes": model.size_bytes,
        "gpu_bytes": model.gpu_bytes,
        "requests": model.num_requests,
        "last_used_s_ago": round(used_s, 1) if model.was_used else None,
        "predicted_ready_s": predicted_ready_s,
        "worker_seconds": {digest: round(s, 3) for digest, s in versions.items()},
        "workers": [msgspec.structs.asdict(worker) for worker in model.workers],
        "operation": None if model.live is None else model.live.shown,
    }


async def _order(control: Control, actor: str, name: str, action: str) -> Response:
    if action not in ACTIONS:
        raise AdminRefusal(404, "not_found", f"no action {action!r}; allowed: {', '.join(ACTIONS)}")
    operation = await order(control, actor, name, ACTIONS[action])
    return _json(operation.shown, 200 if operation.is_over else 202)


async def order(control: Control, actor: str, name: str, wanted: WantedState) -> Operation:
    """Record and start an operation on a model, and return it.

    Raises:
      AdminRefusal: it was not started.
    """
    name = control.changes.switches.version_of(name)
    # Keep unknown names out of the audit log: they may contain anything.
    if name not in control.controller.models:
        raise AdminRefusal(
            404, "model_not_found", str(UnknownModel(name, control.controller.models))
        )
    operation_id = new_id()
    noted = partial(audit, AUDITED[wanted], name, actor, operation_id)
    try:
        await noted(AuditOutcome.BEGUN)
        try:
            operation = control.order(name, wanted, actor, operation_id)
        except NoRoom as error:
            await noted(AuditOutcome.FAILED, reason="no room")
            raise AdminRefusal(409, "no_room", str(error)) from None
        except (Conflict, UnknownModel) as error:  # the model was added or dropped concurrently
            await noted(AuditOutcome.FAILED, reason="conflict")
            raise AdminRefusal(409, "conflict", str(error)) from None
        if operation.id != operation_id:  # joined a running operation, which records its own end
            await noted(AuditOutcome.DONE)
    except AuditLogError as error:
        raise AdminRefusal(503, "not_recorded", str(error)) from error
    return operation


async def _add(control: Control, actor: str) -> Response:
    """Add the model in the body: its name, and the fields of `[models.NAME]`."""
    asked = await _body()
    name = asked.pop("name", None)
    if not isinstance(name, str):
        raise AdminRefusal(
            400, "bad_request", 'the body has no name; send {"name": NAME, "ref": MODEL}'
        )
    fields = [one.name for one in dataclasses.fields(FleetModelConfig)]
    for unknown in asked.keys() - set(fields):
        raise AdminRefusal(
            400, "bad_request", f"unknown field {unknown!r}; allowed: name, {', '.join(fields)}"
        )
    require_model_name(name)
    model = converted(asked, FleetModelConfig)
    if actor != os_user():
        _require_references((model.ref, *model.adapters.values()))
    operation = await _change(control, actor, name, WantedState.ADD, model)
    return _json(operation.shown, 202)


def _require_references(refs: Iterable[str]) -> None:
    """Refuse paths in requests to the port, which all local users can reach: workers would read
    files that the requesting user cannot read, or files that this user wrote."""
    for ref in refs:
        if "/" in ref or not is_reference(ref) or Path(ref).exists():
            raise AdminRefusal(
                403,
                "not_a_version",
                f"{ref!r} is not a version in the store; use the Unix socket to give a path",
            )


async def _drop(control: Control, actor: str, name: str) -> Response:
    operation = await _change(control, actor, name, WantedState.DROP)
    return _json(operation.shown, 202)


async def _switch(control: Control, actor: str, name: str) -> Response:
    """Switch a public model name to the version in the body."""
    (ref,) = _words(await _body(), "ref")
    if actor != os_user():
        _require_references([ref])
    version, order = control.changes.switches.plan(name, ref, control.changes.under_way)
    operation = await _change(control, actor, version, WantedState.SWITCH, order)
    return _json(operation.shown, 202)


async def _load_adapter(control: Control, actor: str, name: str) -> Response:
    """Load the adapter in the body."""
    asked = await _body()
    adapter, ref = _words(asked, "name", "ref")
    return _json((await _begin_load(control, actor, name, adapter, ref)).shown, 202)


async def _unload_adapter(control: Control, actor: str, name: str, adapter: str) -> Response:
    return _json((await _begin_unload(control, actor, name, adapter)).shown, 202)


async def _load_as_vllm(control: Control, actor: str) -> Response:
    """Load an adapter with vLLM's API, which answers when the adapter is loaded."""
    asked = await _body()
    full, ref = _words(asked, "lora_name", "lora_path", known=("lora_int_id", "load_inplace"))
    if asked.get("load_inplace"):
        raise AdminRefusal(
            400,
            "bad_request",
            "load_inplace is not supported, because it would change the weights of running "
            f"requests; unload {full[:80]!r} first, or load the new adapter under another name",
        )
    operation = await _begin_load(control, actor, *_split(control, full), ref)
    await _wait_over(control, operation)
    return _said(f"Success: LoRA adapter '{full}' added successfully.")


async def _unload_as_vllm(control: Control, actor: str) -> Response:
    (full,) = _words(await _body(), "lora_name", known=("lora_int_id",))
    operation = await _begin_unload(control, actor, *_split(control, full))
    await _wait_over(control, operation)
    return _said(f"Success: LoRA adapter '{full}' removed successfully.")


def _words(asked: dict[str, Any], *names: str, known: tuple[str, ...] = ()) -> list[str]:
    """Return string fields of a body.

    Args:
      asked: the body.
      names: required fields.
      known: fields that are accepted and ignored.

    Raises:
      AdminRefusal: 400, a field is missing, unknown or not a string.
    """
    for unknown in asked.keys() - {*names, *known}:
        raise AdminRefusal(
            400, "bad_request", f"unknown field {unknown!r}; allowed: {', '.join(names)}"
        )
    for name in names:
        if not isinstance(asked.get(name), str) or not asked[name]:
            example = ", ".join(f'"{one}": "..."' for one in names)
            raise AdminRefusal(400, "bad_request", f"the body has no {name}; send {{{example}}}")
    return [asked[name] for name in names]


def _split(control: Control, full: str) -> tuple[str, str]:
    """Split MODEL:ADAPTER. The model may be omitted if the fleet has only one.

    Raises:
      AdminRefusal: 400, the model is missing and the fleet has several.
    """
    models = list(control.controller.models)
    name, _, adapter = full.rpartition(SEPARATOR)
    if not name and len(models) != 1:
        raise AdminRefusal(
            400,
            "bad_request",
            f"lora_name {full[:80]!r} does not name a model; give MODEL:NAME, with one of "
            f"{', '.join(models)}",
        )
    return name or models[0], adapter


async def _begin_load(control: Control, actor: str, name: str, adapter: str, ref: str) -> Operation:
    require_adapter_names((adapter,))
    if actor != os_user():
        _require_references((ref,))
    return await _change(control, actor, name, WantedState.LOAD_ADAPTER, AdapterOrder(adapter, ref))


async def _begin_unload(control: Control, actor: str, name: str, adapter: str) -> Operation:
    require_adapter_names((adapter,))
    model = control.controller.models.get(control.changes.switches.version_of(name))
    if model is not None and adapter not in model.config.adapters:
        known = model.config.adapters
        raise AdminRefusal(404, "adapter_not_found", str(UnknownAdapter(name, adapter, known)))
    return await _change(control, actor, name, WantedState.UNLOAD_ADAPTER, AdapterOrder(adapter))


async def _wait_over(control: Control, operation: Operation) -> None:
    """Wait until an operation ends. The operation has its own timeouts.

    Raises:
      AdminRefusal: 400, it failed.
    """
    while not operation.is_over:  # noqa: ASYNC110 (another task ends the operation)
        await trio.sleep(control.config.tick_s)
    if operation.status is OperationStatus.FAILED:
        raise AdminRefusal(400, "not_done", operation.progress)


def _said(text: str) -> Response:
    return Response(text, 200, mimetype="text/plain")


async def _change(
    control: Control,
    actor: str,
    name: str,
    wanted: WantedState,
    settings: FleetModelConfig | AdapterOrder | SwitchOrder | None = None,
) -> Operation:
    """Record and start an operation that changes models or adapters, and return it.

    Raises:
      Conflict: it was not started: the model is being changed.
      UnknownModel: it was not started: no model has this name.
      AuditLogError: it was not started, or its failure was not recorded.
    """
    told = "" if settings is None else msgspec.json.encode(settings).decode()
    operation = control.change(control.changes.switches.version_of(name), wanted, actor, told)
    noted = partial(audit, AUDITED[wanted], operation.subject, actor, operation.id)
    await noted(AuditOutcome.BEGUN)
    try:
        control.begin(operation)
    except (Conflict, UnknownModel):  # the model changed while the entry was written
        await noted(AuditOutcome.FAILED, reason="conflict")
        raise
    return operation


async def _body() -> dict[str, Any]:
    try:
        return msgspec.json.decode(await request.get_data(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdminRefusal(400, "bad_request", f"the body is not a JSON object: {error}") from None


async def _show_operation(control: Control, operation_id: str) -> Response:
    operation = control.operation(operation_id)
    if operation is None:
        raise AdminRefusal(
            404, "not_found", f"operation {operation_id!r} does not exist, or ended long ago"
        )
    return _json(operation.shown)


async def _list_as_llama(control: Control) -> Response:
    """List models in the format of llama.cpp's router."""
    models = [
        {
            "id": name,
            "object": "model",
            "owned_by": "triolet",
            "path": model.config.model_dir,
            "status": {"value": LLAMA_STATUS[model.state]},
        }
        for name, model in control.controller.models.items()
    ]
    return _json({"object": "list", "data": models})


async def _order_as_llama(control: Control, actor: str, action: str) -> Response:
    """Load or unload the model in the body, with the API of llama.cpp's router."""
    if action not in ("load", "unload"):
        raise AdminRefusal(404, "not_found", f"no action {action!r}; allowed: load, unload")
    name = (await _body()).get("model")
    if not isinstance(name, str):
        raise AdminRefusal(400, "bad_request", 'the body has no name; send {"model": NAME}')
    await order(control, actor, name, ACTIONS[action])
    return _json({"success": True})


async def _on_error(error: Exception) -> Response:
    match error:
        case AdminRefusal():
            return _error(error.status, error.code, str(error))
        case UnknownModel() | UnknownRollout():
            return _error(404, "model_not_found", str(error))
        case Conflict() | RolloutRefused():
            return _error(409, "conflict", str(error))
        case ConfigError():
            return _error(400, "bad_request", str(error))
        case AuditLogError():
            return _error(503, "not_recorded", str(error))
        case HTTPException(code=int(status)):
            return _error(status, "bad_request", f"{error.name}; the routes are below /admin")
    log.error("admin_request_failed", path=request.path, exc_info=error)
    return _error(500, "server_error", "control failed on this request; see its log")


def _error(status: int, code: str, message: str) -> Response:
    return _json({"error": {"message": message, "code": code}}, status)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value) + b"\n", status, mimetype="application/json")
