"""Every environment that ships, by slug. One row each; the shared contract test runs over this table."""

from __future__ import annotations

from rl_core.environments import code_repair, short_replies, word_problems
from rl_core.environments.environment import Environment

ENVIRONMENTS: dict[str, Environment] = {
    environment.slug: environment
    for environment in (word_problems.ENVIRONMENT, code_repair.ENVIRONMENT, short_replies.ENVIRONMENT)
}
