"""Settings: the one place that reads the environment. `docs/settings.md` has a row for each variable."""

from __future__ import annotations

import contextlib
import os
import secrets
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from django.core.exceptions import ImproperlyConfigured

from controlplane.env import Env
from rl_core.types import WeightFormat

BASE_DIR = Path(__file__).resolve().parent.parent
env = Env(os.environ)  # noqa: TID251

# Everything Slipway writes lies under one folder.
STATE_DIR = Path(env.text("SLIPWAY_STATE", str(BASE_DIR / "var"))).resolve()
SERVICES_FILE = STATE_DIR / "services.json"
RUNTIME_DIR = STATE_DIR / "run"  # sockets, tokens, pid files


class EmbeddedServices(msgspec.Struct):
    """Where `manage.py services start` put PostgreSQL and Valkey."""

    database_url: str = ""
    redis_url: str = ""


def _embedded_services() -> EmbeddedServices:
    if not SERVICES_FILE.exists():
        return EmbeddedServices()
    try:
        return msgspec.json.decode(SERVICES_FILE.read_bytes(), type=EmbeddedServices)
    except msgspec.MsgspecError as error:
        raise ImproperlyConfigured(f"{SERVICES_FILE} is damaged ({error}); run: manage.py services start") from error


def _secret_key() -> str:
    """The configured key, or one made once and kept in the state folder, readable by its owner alone."""
    configured = env.text("SECRET_KEY")
    if configured:
        return configured
    path = STATE_DIR / "secret_key"
    if not path.exists():
        STATE_DIR.mkdir(parents=True, exist_ok=True)
        partial = STATE_DIR / f".secret_key.{uuid.uuid4().hex}"
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(48))
            # Whole or not at all, and the first of several processes that start at once makes it for all of them.
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(partial)
        finally:
            partial.unlink(missing_ok=True)
    key = path.read_text().strip()
    if not key:
        raise ImproperlyConfigured(f"{path} is empty: put it back from a backup, or remove it and seal secrets anew")
    return key


def _database(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme not in ("postgres", "postgresql"):
        raise ImproperlyConfigured(f"DATABASE_URL must begin with postgresql://, not {parts.scheme!r}")
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "CONN_MAX_AGE": 0,
        "OPTIONS": {"pool": {"min_size": 0, "max_size": env.count("DATABASE_POOL", 8), "timeout": 10}},
    }


_embedded = _embedded_services()
DATABASE_URL = env.text("DATABASE_URL", _embedded.database_url) or "postgresql://slipway@127.0.0.1:5432/slipway"
REDIS_URL = env.text("REDIS_URL", _embedded.redis_url) or "redis://127.0.0.1:6379"
BROKER_URL = env.text("BROKER_URL", REDIS_URL)
# Whether `manage.py services` provides something that the environment does not name.
EMBEDDED = not (env.text("DATABASE_URL") and env.text("REDIS_URL"))
SECRET_KEY = _secret_key()

DEBUG = env.flag("DEBUG")
ALLOWED_HOSTS = env.words("ALLOWED_HOSTS", ["localhost", "127.0.0.1", "[::1]"])
CSRF_TRUSTED_ORIGINS = env.words("CSRF_TRUSTED_ORIGINS", [])
ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"
AUTH_USER_MODEL = "controlplane.User"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
MIGRATION_MODULES = {"controlplane": "migrations"}
DATABASES = {"default": _database(DATABASE_URL)}

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.postgres",
    "rest_framework",
    "drf_spectacular",
    "django_filters",
    "channels",
    "controlplane",
    "frontend",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "controlplane.middleware.RequestIdMiddleware",
    "controlplane.middleware.ContentSecurityPolicyMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "/login/"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = env.flag("COOKIES_SECURE")
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"

USE_TZ = True
TIME_ZONE = "UTC"
USE_I18N = False
STATIC_URL = "/static/"
STATIC_ROOT = STATE_DIR / "static"
WHITENOISE_USE_FINDERS = True

DATA_UPLOAD_MAX_MEMORY_SIZE = 8 * 1024 * 1024
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.api.authentication.ApiKeyAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["controlplane.api.permissions.ProjectPermission"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_PAGINATION_CLASS": "controlplane.api.pagination.TimeCursorPagination",
    "DEFAULT_FILTER_BACKENDS": ["django_filters.rest_framework.DjangoFilterBackend"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "controlplane.api.problems.problem_handler",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Slipway",
    "DESCRIPTION": "Control plane for real-time reinforcement learning of agent models.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_SPLIT_REQUEST": True,
}

CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "slipway"},
    }
}

# The object store, as an obstore URL or a folder.
STORE_URL = env.text("STORE_URL", (STATE_DIR / "store").as_uri())
CHECKPOINT_DIR = Path(env.text("CHECKPOINT_DIR", str(STATE_DIR / "checkpoints")))
SANDBOX_SOCKET = Path(env.text("SANDBOX_SOCKET", str(RUNTIME_DIR / "sandboxd.sock")))
REPLICA_TOKEN_DIR = RUNTIME_DIR / "tokens"

# What is derived from published versions, and how long weights are kept.
SKIP_DELTAS = env.numbers("SKIP_DELTAS", [8, 64])
SNAPSHOT_EVERY = env.number("SNAPSHOT_EVERY", 128)
SERVING_FORMATS = env.choices("SERVING_FORMATS", [name.value for name in WeightFormat if name is not WeightFormat.BF16])
RETENTION_VERSIONS = env.number("RETENTION_VERSIONS", 64)
ROLLBACK_DAYS = env.number("ROLLBACK_DAYS", 30)
AUDIT_DAYS = env.number("AUDIT_DAYS", 0)
EXPORT_DAYS = env.number("EXPORT_DAYS", 7)
GARBAGE_GRACE_S = env.number("GARBAGE_GRACE_S", 24 * 3600)
GARBAGE_EVERY_S = env.number("GARBAGE_EVERY_S", 3600)

# Timing of the control loop, in seconds.
CONDUCTOR_TICK_S = env.number("CONDUCTOR_TICK_MS", 500) / 1000
REDELIVERY_S = env.number("REDELIVERY_S", 20)
LEASE_S = env.number("LEASE_S", 30)
ROLLOUT_SLICE_S = env.number("ROLLOUT_SLICE_S", 60)
TRAINER_THREADS = env.count("TRAINER_THREADS", 1)
ENGINE_THREADS = env.count("ENGINE_THREADS", 1)
UPDATE_THREADS = env.count("UPDATE_THREADS", 1)
ENGINE_MAX_SEQS = env.count("ENGINE_MAX_SEQS", 32)
GATEWAY_TIMEOUT_S = env.number("GATEWAY_TIMEOUT_S", 300)
GATEWAY_FIRST_TOKEN_S = env.number("GATEWAY_FIRST_TOKEN_S", 60)
GATEWAY_MAX_REQUESTS = env.number("GATEWAY_MAX_REQUESTS", 256)
PUBLIC_URL = env.text("PUBLIC_URL")
FEEDBACK_HORIZON_S = env.number("FEEDBACK_HORIZON_S", 6 * 3600)
REPLICA_FORGET_S = env.number("REPLICA_FORGET_S", 24 * 3600)
ALERT_HOOK_NETWORKS = env.networks("ALERT_HOOK_NETWORKS")
GRADER_NETWORKS = env.networks("GRADER_NETWORKS")
METRICS_NETWORKS = env.networks("METRICS_NETWORKS")
REPLICA_NETWORKS = env.networks("REPLICA_NETWORKS")
_grader_secrets = env.text("GRADER_SECRETS")
GRADER_SECRETS = Path(_grader_secrets) if _grader_secrets else None

LOG_LEVEL = env.text("LOG_LEVEL", "INFO")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(levelname)s %(name)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    "loggers": {name: {"level": "WARNING"} for name in ("httpx", "httpx2", "httpcore", "httpcore2")},
}
