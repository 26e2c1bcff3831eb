"""The answers that a module of exercises has for the tests that it imports from tests/answers.py."""


def pytest_generate_tests(metafunc):
    for fixture, answers in (("wrong_answer", "WRONG"), ("right_answer", "RIGHT")):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, getattr(metafunc.module, answers))
