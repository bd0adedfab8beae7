"""What every endpoint of the API shares. A view declares; this module does.

class RunList(Create, ListView):
    actions = {"GET": Action.READ, "POST": Action.RUNS_CONTROL}
    serializer_class, input_serializer = RunSerializer, RunCreateSerializer
"""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from django.db.models import Model, QuerySet
from rest_framework.exceptions import MethodNotAllowed
from rest_framework.generics import GenericAPIView
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer, Serializer

from controlplane.api.idempotency import answer_once
from controlplane.api.pagination import CURSOR_PARAM, SIZE_PARAM, Keyset
from controlplane.api.schema import ProblemSchema
from controlplane.api.wire import FiniteJSONRenderer, StrictJSONParser
from controlplane.errors import Invalid, NotFound
from controlplane.models import Project
from controlplane.permissions import Action
from controlplane.principals import Principal
from controlplane.services.events import Actor


class ApiView(GenericAPIView[Any]):
    """Base of all views: authenticated, of one project unless it says otherwise, strict about its input.

    `actions` maps each method to the action that the permission matrix is asked for. `query` names the query
    parameters beside those of filters and pages; any other is refused, so that a misspelt filter is no silent success.
    """

    actions: ClassVar[dict[str, Action]] = {"GET": Action.READ}
    project_scoped: ClassVar[bool] = True
    query: ClassVar[frozenset[str]] = frozenset()
    parser_classes = [StrictJSONParser]
    renderer_classes = [FiniteJSONRenderer]
    http_method_names = ["get", "post", "delete", "head"]
    schema = ProblemSchema()
    principal: Principal
    project: Project

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Refuse unknown methods and query parameters before anything runs."""
        name = (request.method or "").lower()
        if name not in self.http_method_names or not hasattr(self, name):
            raise MethodNotAllowed(request.method or "")
        super().initial(request, *args, **kwargs)
        unknown = sorted(set(request.query_params) - self.known_parameters())
        if unknown:
            raise Invalid(f"unknown query parameter {unknown[0][:100]!r}", unknown[0][:100])

    def known_parameters(self) -> frozenset[str]:
        """Query parameters that the endpoint reads."""
        return self.query

    @property
    def actor(self) -> Actor:
        """The caller, for the event log."""
        return self.principal.actor

    def validated(self, serializer_class: type[Serializer[Any]]) -> dict[str, Any]:
        """The body, checked. Raises: ValidationError (422)."""
        serializer = serializer_class(data=self.request.data, context=self.get_serializer_context())
        serializer.is_valid(raise_exception=True)
        return dict(serializer.validated_data)

    def rendered(self, value: Any, *, serializer: type[BaseSerializer[Any]] | None = None) -> Any:
        """A row as the API shows it."""
        chosen = serializer or self.get_serializer_class()
        return chosen(value, context=self.get_serializer_context()).data


class ListView(ApiView):
    """`GET` → one page of `rows()`, filtered by the view's filter set, in the order of `keyset`."""

    keyset: ClassVar[Keyset] = Keyset()

    def get(self, request: Request, **kwargs: Any) -> Response:
        """One page."""
        page = self.paginate_queryset(self.filter_queryset(self.get_queryset()))
        return self.get_paginated_response(self.get_serializer(page, many=True).data)

    def rows(self) -> QuerySet[Any]:
        """What there is to list, of this project alone."""
        raise NotImplementedError

    def get_queryset(self) -> QuerySet[Any]:
        """For REST framework and the schema: `rows`, which need a request."""
        if getattr(self, "swagger_fake_view", False):
            model: Any = self.get_serializer_class().Meta.model  # type: ignore[attr-defined]
            empty: QuerySet[Any] = model.objects.none()
            return empty
        return self.rows()

    def known_parameters(self) -> frozenset[str]:
        """Those of pages, of filters, and the view's own."""
        filters = getattr(self, "filterset_class", None)
        names = frozenset(filters.base_filters) if filters else frozenset()
        return self.query | names | {CURSOR_PARAM, SIZE_PARAM}


class DetailView(ApiView):
    """`GET` → one row."""

    filter_backends = ()
    pagination_class = None

    def get(self, request: Request, **kwargs: Any) -> Response:
        """The row."""
        return Response(self.rendered(self.row()))

    def row(self) -> Any:
        """The row of the path. Raises: NotFound."""
        raise NotImplementedError


class Post:
    """`POST` → `perform(data)`, in a transaction, once per `Idempotency-Key`.

    `input_serializer` checks the body; `answer_serializer` (else `serializer_class`) documents the answer.
    """

    input_serializer: type[Serializer[Any]]
    answer_serializer: type[BaseSerializer[Any]] | None = None
    success_status: int = 201
    secret_fields: frozenset[str] = frozenset()

    def post(self: Any, request: Request, **kwargs: Any) -> Response:
        """Check, then do it once."""
        data = self.validated(self.input_serializer)

        def perform() -> tuple[Response, Project | None]:
            value = self.perform(data)
            body = self.rendered(value, serializer=self.answer_serializer)
            return Response(body, status=self.success_status), self.kept_under(value)

        return answer_once(
            request=request,
            identity=self.principal.identity,
            project=getattr(self, "project", None),
            perform=perform,
            secret_fields=self.secret_fields,
        )

    def perform(self, data: dict[str, Any]) -> Any:
        """Call the service; return what to answer with."""
        raise NotImplementedError

    def kept_under(self: Any, value: Any) -> Project | None:
        """The project under which the answer is kept for replays."""
        return getattr(self, "project", None)


class ActionView(Post, ApiView):
    """A POST on something that exists, such as `/runs/{id}/pause`."""

    success_status = 200
    filter_backends = ()
    pagination_class = None


def one(rows: QuerySet[Any], what: str, **lookup: Any) -> Any:
    """The only row that matches. Raises: NotFound, which is also the answer for rows of other projects."""
    row: Model | None = rows.filter(**lookup).first()
    if row is None:
        raise NotFound(f"there is no such {what} in this project")
    return row


def as_uuid(text: str, field: str) -> uuid.UUID:
    """Raises: Invalid."""
    try:
        return uuid.UUID(text)
    except ValueError as error:
        raise Invalid(f"{field} must be a UUID", field) from error
