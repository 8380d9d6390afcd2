"The stored scores and distributions, computed again from the benchmarks' own files (folder: CIRKIT_DATA)."
import os
from pathlib import Path
import pandas as pd
import pytest
from cirkit.audit.classify_measured import benchmark_distributions, evaluate_on, measured
from cirkit.paths import data_dir

pytestmark = pytest.mark.shared

@pytest.fixture(scope='module')
def data():
    folder = Path(os.environ.get('CIRKIT_DATA') or '')
    if not os.environ.get('CIRKIT_DATA') or not (folder / 'circo').is_dir():
        pytest.fail("set CIRKIT_DATA to a folder with circo/, cirr/ and fashioniq/ (or leave these tests out: -m 'not shared')")
    return folder

@pytest.mark.parametrize('part', ['development', 'held-out'])
@pytest.mark.parametrize('benchmark', ['all', 'circo', 'cirr', 'fashioniq'])
def test_scores_are_the_stored_ones(data, part, benchmark):
    again = evaluate_on(data, part, benchmark=None if benchmark == 'all' else benchmark)
    pd.testing.assert_frame_equal(again, measured(part, benchmark), rtol=0, atol=1e-6, check_dtype=False)

def test_held_out_quality(data):
    micro = evaluate_on(data).set_index('subcategory').loc['micro']
    assert micro.precision > 0.85 and micro.recall > 0.85

def test_distributions_are_the_stored_ones(data):
    stored = pd.read_csv(data_dir() / 'labels' / 'distributions.csv')
    pd.testing.assert_frame_equal(benchmark_distributions(data), stored, check_dtype=False)
