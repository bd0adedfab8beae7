"""Policy versions as links to their pages."""

from __future__ import annotations

from typing import Any

from django import template
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from frontend.templatetags.slipway import named, version

register = template.Library()


@register.filter
def version_link(value: Any) -> SafeString | str:
    """A version within its lineage, epoch and number, as a link."""
    return _link(value, version(value))


@register.filter
def named_link(value: Any) -> SafeString | str:
    """A version where those of several lineages meet, as a link."""
    return _link(value, named(value))


def _link(value: Any, text: str) -> SafeString | str:
    if not value:
        return text
    return format_html('<a href="{}" title="version {}">{}</a>', reverse("version", args=[value.pk]), value.ref, text)
