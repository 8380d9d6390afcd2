"No test is left out without a word: the reason of every skip is printed at the end, also under -q."


def pytest_configure(config):
    if "s" not in config.option.reportchars: config.option.reportchars += "s"
