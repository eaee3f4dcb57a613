"""Routes of a server: paths, methods, the API key, and errors as responses."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import weft
from weft.arguments import shortened
from weft.serve import tokens
from weft.serve.app import CLIENT_LEFT, ApiError, Service, check_model
from weft.serve.checks import BadField
from weft.serve.completions import CHAT, COMPLETION, complete
from weft.serve.embeddings import embeddings
from weft.serve.responses import responses


def create_app(service: Service) -> FastAPI:
    """Application that serves OpenAI's API, and vLLM's further paths."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    keyed = [Depends(_authorised(service.options.api_key))]
    api, beside = APIRouter(prefix="/v1", dependencies=keyed), APIRouter(dependencies=keyed)

    @api.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await complete(service, request, CHAT)

    @api.post("/completions")
    async def completions(request: Request) -> Response:
        return await complete(service, request, COMPLETION)

    @api.post("/responses")
    async def response(request: Request) -> Response:
        return await responses(service, request)

    @api.post("/embeddings")
    async def vectors(request: Request) -> Response:
        return await embeddings(service, request)

    @api.get("/models")
    async def models() -> dict[str, Any]:
        names = [service.options.model_name, *service.adapters]
        return {"object": "list", "data": [_model(service, name) for name in names]}

    @api.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(service, name)
        return _model(service, name)

    @beside.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await tokens.tokenize(service, request)

    @beside.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await tokens.detokenize(service, request)

    @app.get("/health")
    @app.api_route("/ping", methods=["GET", "POST"])
    async def health() -> Response:
        service.check_ready()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": weft.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(api)
    app.include_router(beside)
    _add_errors(app)
    return app


def _add_errors(app: FastAPI) -> None:
    """Have the application answer errors in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(error.status)
        return JSONResponse(error.content, error.status, headers)

    @app.exception_handler(BadField)
    async def bad_field(request: Request, error: BadField) -> Response:
        return await refused(request, ApiError(400, shortened(error, 1000), error.param))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_LEFT)  # none is sent, but the log has no traceback

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {shortened(request.url.path)}: {error.detail}"
        return await refused(request, ApiError(error.status_code, message))


def _authorised(api_key: str | None) -> Callable[[Request], None]:
    async def check(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Header bytes reach here as Latin-1.
        equal = api_key is None or hmac.compare_digest(key.strip().encode("latin-1"), api_key.encode())
        if not equal or (api_key is not None and scheme.lower() != "bearer"):
            raise ApiError(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )

    return check


def _model(service: Service, name: str) -> dict[str, Any]:
    """The model, or an adapter of it, which says its `parent`."""
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "weft",
        "max_model_len": service.llm.max_seq_len,
        **({"parent": service.options.model_name} if name in service.adapters else {}),
    }
