from rl_core.windows.actors import HOUR_S, busy_actors, outlying_actors


def test_a_program_sends_more_than_people_do_in_some_hour():
    bot = [("bot", 100.0 * number) for number in range(11)]  # eleven within 1000 s
    person = [("person", 400.0 * number) for number in range(20)]  # nine or ten in any hour
    assert busy_actors([*person, *bot], an_hour=10) == {"bot"}
    assert busy_actors(bot[:10], an_hour=10) == set()
    assert busy_actors([("a", 0.0), ("a", HOUR_S - 1)], an_hour=1) == {"a"}
    assert busy_actors([("a", 0.0), ("a", HOUR_S)], an_hour=1) == set()
    assert busy_actors(bot, an_hour=0) == set()
    assert busy_actors([("", 1.0)] * 50, an_hour=10) == set()


def test_who_rates_like_nobody_else_is_left_out():
    usual = [(f"u{number}", float(vote < 8)) for number in range(20) for vote in range(10)]
    spoiler = [("spoiler", 0.0)] * 12
    assert outlying_actors([*usual, *spoiler], deviations=4.0, minimum=8) == {"spoiler"}
    assert outlying_actors([*usual, *spoiler[:7]], deviations=4.0, minimum=8) == set()
    assert outlying_actors([*usual, *spoiler], deviations=0.0, minimum=8) == set()


def test_an_outlier_with_many_answers_does_not_hide_behind_them():
    """Two fifths of all answers are the spoiler's: measured with them, everybody would seem to differ."""
    usual = [(f"u{number}", float(vote < 8)) for number in range(6) for vote in range(10)]
    assert outlying_actors([*usual, *[("spoiler", 0.0)] * 40], deviations=4.0, minimum=8) == {"spoiler"}


def test_the_strict_are_no_outliers_where_people_differ():
    mixed = [(f"u{number}", float(vote < number % 11)) for number in range(22) for vote in range(10)]
    assert outlying_actors([*mixed, *[("strict", 0.0)] * 12], deviations=4.0, minimum=8) == set()


def test_the_only_dissent_is_not_silenced():
    agreed = [(f"u{number}", 1.0) for number in range(20) for _ in range(10)]
    assert outlying_actors([*agreed, *[("dissent", 0.0)] * 12], deviations=4.0, minimum=8) == set()
