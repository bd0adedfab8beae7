"""Every environment that ships, by slug. One row each; the shared contract test runs over this table."""

from __future__ import annotations

from rl_core.environments import bug_repair, code_repair, human_eval, short_replies, stockroom, word_problems
from rl_core.environments.environment import Environment

ENVIRONMENTS: dict[str, Environment] = {
    environment.slug: environment
    for environment in (
        word_problems.ENVIRONMENT,
        stockroom.ENVIRONMENT,
        code_repair.ENVIRONMENT,
        human_eval.ENVIRONMENT,
        bug_repair.ENVIRONMENT,
        short_replies.ENVIRONMENT,
    )
}
