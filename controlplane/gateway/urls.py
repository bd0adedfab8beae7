"""Routes under `/v1/`, where OpenAI clients look."""

from __future__ import annotations

from django.urls import path

from controlplane.gateway import views

urlpatterns = [
    path("chat/completions", views.chat_completions),
    path("models", views.models),
]
