import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def quick_prices(cache, monkeypatch):
    """Steps on this machine are timed for the first test that asks for their prices, in short."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr("nde_talf.pipelines.runs.decoder.CONTEXTS", (64,))
    monkeypatch.setattr("nde_talf.selector.profiling.MAX_BATCHES", 2)
    monkeypatch.setattr("nde_talf.selector.prices.AGREE", 99.0)  # kept however noisy it is
