"""The way in."""

from __future__ import annotations

import math

from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import HttpResponse

from frontend.forms.login import LoginForm


class Login(LoginView):
    """Django's view, with 429 for who guesses too often."""

    template_name = "frontend/login.html"
    authentication_form = LoginForm
    redirect_authenticated_user = True

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        """The form again, with what was wrong."""
        response = super().form_invalid(form)
        wait_s = getattr(form, "wait_s", 0.0)
        if wait_s > 0:
            response.status_code = 429
            response["Retry-After"] = str(math.ceil(wait_s))
        return response
