"""The bridge to MTEB. What needs MTEB itself is marked: `pytest -m mteb tests/test_mteb_bridge.py`.

Asked for without the extra these tests fail; they never skip. No test downloads anything: connections are refused.
"""
import dataclasses
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from cirkit.embed.protocol import from_callable
from cirkit.errors import CirkitError
from cirkit.fingerprint import digest
from cirkit.io import read_image, write_image
from cirkit.metrics import per_query
from cirkit.ranktable import rank_benchmark
from cirkit.records import Benchmark, Candidate, Protocol, Query
from cirkit.report import mteb_bridge as bridge
from cirkit.report.run import toy_run


@pytest.fixture(scope='module')
def toy(tmp_path_factory): return toy_run(tmp_path_factory.mktemp('toy')).bench


# without MTEB

def test_importing_the_bridge_imports_neither_mteb_nor_datasets():
    code = "import sys, cirkit.report.mteb_bridge; sys.exit(bool({'mteb', 'datasets', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_without_the_extra_the_error_names_it(toy, monkeypatch):
    monkeypatch.setitem(sys.modules, 'mteb', None)
    for call in (lambda: bridge.as_task(toy.folder), lambda: bridge.as_encoder(None), lambda: bridge.evaluate(toy.folder, 'world-clip')):
        with pytest.raises(CirkitError, match=r"pip install 'cirkit\[mteb\]'") as failure: call()
        assert '\n' not in str(failure.value)


@pytest.mark.parametrize('turn', range(1, 9))
def test_a_turned_photograph_keeps_the_pixels_that_cirkit_reads(tmp_path, turn):
    path, tags = tmp_path/'a.jpg', Image.Exif()
    tags[274] = turn
    Image.fromarray(np.random.default_rng(turn).integers(0, 255, (8, 12, 3), np.uint8)).save(path, exif=tags)
    cell = bridge.image_cell(path)
    assert (cell['bytes'] is None) == (turn == 1)
    if cell['bytes']: path = tmp_path/'b.png'; path.write_bytes(cell['bytes'])
    with Image.open(path) as image: seen = np.asarray(ImageOps.exif_transpose(image))   # what the datasets library does
    np.testing.assert_array_equal(seen, read_image(tmp_path/'a.jpg'))


@pytest.mark.parametrize('mode', ['RGB', 'RGBA', 'L', 'LA', 'P', 'CMYK', '1'])
def test_pictures_of_all_modes_become_items(tmp_path, mode):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (6, 5, 3), np.uint8)).convert(mode)
    [item] = bridge.batch_items({'image': [picture]}, tmp_path)
    np.testing.assert_array_equal(read_image(item.images[0]), np.asarray(picture.convert('RGB')))


@given(st.dictionaries(st.text(max_size=3), st.sets(st.integers(0, 9).map(str), max_size=4), max_size=4))
@settings(max_examples=30, deadline=None)
def test_all_but_leaves_out_just_those(out):
    lists = bridge.AllBut([str(i) for i in range(10)], out)
    assert len(lists) == len(out) and list(lists) == list(out)
    for qid in out:
        assert qid in lists and set(lists[qid]) == {str(i) for i in range(10)} - out[qid]


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_the_bounds_hold_every_order_of_ties(toy, seed, levels):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels + 1, (15, 60)).astype(float)
    ranks = rank_benchmark(toy, scores + 1, np.eye(60), 'coarse', 'composed')
    key = scores + 1 + rng.random(60)/2                        # some order within each level
    place = [1 + (key[i] > key[i, 4*i]).sum() for i in range(15)]
    table = bridge.compare({'hit_rate_at_10': np.mean([p <= 10 for p in place]), 'mrr_at_10': np.mean([(p <= 10)/p for p in place])},
                           ranks, ('hit@10', 'MRR@10'))
    assert table.agree.all() and (table.pessimistic <= table.cirkit + 1e-9).all() and (table.cirkit <= table.optimistic + 1e-9).all()


def test_other_objects_are_no_models():
    with pytest.raises(CirkitError, match='dict is no model'): bridge._model({})


# with MTEB

def mean_colour(images, texts=None): return np.stack([np.mean([read_image(p).mean((0, 1)) for p in some], 0) for some in images]) + 1


@pytest.fixture(scope='module')
def colour(): return from_callable('mean-colour', mean_colour, mean_colour, dim=3)


@pytest.fixture(scope='module')
def mteb():
    try: return bridge.need_mteb()
    except CirkitError as e: pytest.fail(f'-m mteb needs the extra: {e}')


@pytest.fixture(scope='module')
def clip():
    from cirkit.embed.catalogue import load
    return load('world-clip')


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def refuse(self, address, *rest):
        raise AssertionError(f'a test wants to connect to {address}')
    monkeypatch.setattr(socket.socket, 'connect', refuse)


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    "Twelve rendered queries with three candidates each and their references, which the protocol excludes."
    from cirkit.world.captions import instruction
    from cirkit.world.edits import apply_edit, propose_edits
    from cirkit.world.render import render
    from cirkit.world.scene import sample_scene
    folder, queries, gallery, pos, neg = tmp_path_factory.mktemp('world'), [], [], {}, {}
    def picture(name, scene): write_image(folder/name, render(scene, 96)); return name
    for i in range(12):
        rng, scene = np.random.default_rng(i), sample_scene(100 + i)
        wishes = ('color', 'style', 'time')
        edits = next(e for s in (*wishes[i % 3:], *wishes) if len(e := propose_edits(scene, s, rng, 3)) == 3)
        name = picture(f'images/{i}.jpg', scene)
        gallery.append(Candidate(f'r{i}', name))
        gallery += [Candidate(f'c{i}-{j}', picture(f'images/{i}-{j}.jpg', apply_edit(scene, e))) for j, e in enumerate(edits)]
        queries.append(Query(f'q{i}', (name,), instruction(edits[0], scene, rng), source=str(i)))
        pos[f'q{i}'], neg[f'q{i}'] = (f'c{i}-0',), tuple(f'c{i}-{j}' for j in range(1, len(edits)))
    return Benchmark('tiny-world', '1', 'test', Protocol('edir', 'all'), tuple(queries), tuple(gallery), pos, neg,
                     meta={'licence': 'CC BY-SA 4.0'}).save(folder)


def moved(bench, folder):
    "A benchmark, changed in memory, with its images in another folder."
    shutil.copytree(bench.folder/'images', folder/'images')
    return bench.save(folder)


def untied(ranks): return not any(map(max, ranks.tied))


@pytest.mark.mteb
def test_a_task_says_what_it_is(mteb, world):
    task = bridge.as_task(world.folder)
    about = task.metadata
    assert (about.name, about.category, about.type, about.main_score) == ('tiny-world-test-all', 'it2i', 'Any2AnyRetrieval', 'hit_rate_at_1')
    assert (about.revision, about.license, set(about.modalities)) == (world.fingerprint, 'cc-by-sa-4.0', {'image', 'text'})
    assert about.eval_splits == ['test'] and not about.is_public
    assert str(len(world.gallery)) in about.description and world.gallery_hash[:12] in about.description
    task.load_data()
    split = task.dataset['default']['test']
    np.testing.assert_array_equal(np.asarray(split['queries'][3]['image']), read_image(world.path(world.queries[3].images[0])))
    assert split['queries'][3]['text'] == world.queries[3].text and list(split['corpus']['id']) == [c.id for c in world.gallery]


@pytest.mark.mteb
@pytest.mark.parametrize('modality', ['composed', 'text', 'image'])
def test_both_programs_agree_on_a_rendered_benchmark(mteb, world, clip, modality):
    table = bridge.evaluate(world.folder, clip, modality)
    assert table.attrs['tied_queries'] == 0
    np.testing.assert_allclose(table.mteb, table.cirkit, rtol=0, atol=1e-5)
    assert table.agree.all() and len(table) == 7 and 0 < table.mteb.iloc[-3] < 1        # nDCG@10 is not trivial
    assert table.attrs['model_revision'] == digest(clip.fingerprint()) and table.attrs['gallery_size'] == len(world.gallery)


@pytest.mark.mteb
def test_the_way_through_files_and_the_store_gives_the_same_numbers(mteb, world, clip, tmp_path):
    from cirkit.ranktable import read_ranks
    from cirkit.report.evaluate import embed_models, rank_models
    embed_models(world.folder, [clip], tmp_path, False)
    rank_models(world.folder, [clip], tmp_path, False)
    ranks = read_ranks(tmp_path/'ranks'/'world-clip.composed.parquet')
    result = mteb.evaluate(bridge.as_encoder(clip), bridge.as_task(world.folder), cache=None, co2_tracker=False, show_progress_bar=False)
    scores = result.task_results[0].scores['test'][0]
    assert untied(ranks)
    place = ranks.above.str[0] + 1                                                       # by hand, one positive a query
    for name, value in {'hit_rate_at_1': place == 1, 'recall_at_1': place == 1, 'hit_rate_at_10': place <= 10,
                        'ndcg_at_10': (place <= 10)/np.log2(place + 1), 'mrr_at_10': (place <= 10)/place}.items():
        np.testing.assert_allclose(scores[name], value.mean(), rtol=0, atol=1e-5, err_msg=name)
    assert scores['main_score'] == scores['hit_rate_at_1']
    assert (result.model_name, result.model_revision) == ('cirkit/world-clip', digest(clip.fingerprint()))
    assert result.task_results[0].dataset_revision == world.fingerprint


@pytest.mark.mteb
def test_the_reference_is_no_candidate_where_the_protocol_says_so(mteb, world, clip, tmp_path):
    kept = moved(dataclasses.replace(world, protocol=Protocol('kept', 'all', exclude_reference=False)), tmp_path/'kept')
    with_reference, without = bridge.evaluate(kept.folder, clip, 'image'), bridge.evaluate(world.folder, clip, 'image')
    assert with_reference.agree.all() and without.agree.all()
    assert with_reference.mteb[0] == 0 < without.mteb[0]                                 # an image finds itself first
    assert with_reference.attrs['revision'] != without.attrs['revision']


@pytest.mark.mteb
def test_ties_go_by_id_there_and_by_expectation_here(mteb, toy, tmp_path):
    def grey(images, texts=None): return np.stack([[1., read_image(some[0]).mean() > 127] for some in images])
    def renamed(prefix):
        def new(id): return prefix*id.endswith('-0') + id
        bench = dataclasses.replace(toy, gallery=tuple(dataclasses.replace(c, id=new(c.id)) for c in toy.gallery),
                                    pos={q: tuple(map(new, ids)) for q, ids in toy.pos.items()})
        return moved(bench, tmp_path/prefix).folder
    low, high = (bridge.evaluate(renamed(p), from_callable('grey', grey, grey, dim=2)) for p in ('0', 'z'))
    assert low.attrs['tied_queries'] == 15 and low.agree.all() and high.agree.all()
    np.testing.assert_allclose(low.cirkit, high.cirkit)
    assert (low.mteb <= low.cirkit + 1e-5).all() and (high.mteb > low.mteb).any()


@pytest.mark.mteb
def test_a_gallery_for_each_query(mteb, toy, colour, tmp_path):
    bench = moved(dataclasses.replace(toy, protocol=Protocol('genecis', 'per-query', exclude_reference=False)), tmp_path)
    result = mteb.evaluate(bridge.as_encoder(colour), bridge.as_task(tmp_path), cache=None, co2_tracker=False, show_progress_bar=False)
    from cirkit.report.evaluate import items
    queries, gallery = items(bench)
    ranks = rank_benchmark(bench, colour.encode(queries, 'query', 'composed'), colour.encode(gallery, 'target', 'image'), 'colour', 'composed')
    np.testing.assert_allclose(result.task_results[0].get_score(), per_query(ranks, ['choice']).choice.mean(), atol=1e-5)
    assert not any(map(max, ranks.choice_tied))
    with pytest.raises(CirkitError, match='each has its own'): bridge.evaluate(tmp_path, colour)


@pytest.mark.mteb
def test_several_positives(mteb, toy, colour, tmp_path):
    pos = {q.id: tuple(f'{q.source}-{j}' for j in range(1 + i % 4)) for i, q in enumerate(toy.queries)}
    table = bridge.evaluate(moved(dataclasses.replace(toy, pos=pos, neg={}), tmp_path).folder, colour, metrics=(
        'hit@3', 'recall@1', 'recall@3', 'recall@20', 'nDCG@1', 'nDCG@3', 'nDCG@10', 'MRR@100', 'mAP_all@3', 'mAP_all@100'))
    assert table.attrs['tied_queries'] == 0 and table.mteb.nunique() > 6
    np.testing.assert_allclose(table.mteb, table.cirkit, rtol=0, atol=1e-5)


@pytest.mark.mteb
@pytest.mark.parametrize('similarity', ['cosine', 'dot'])
def test_a_model_of_mteb_runs_on_our_benchmark(mteb, world, similarity):
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.model_meta import ModelMeta, ScoringFunction
    class Colours(AbsEncoder):
        "Mean colour, and the text's length; not unit rows."
        mteb_model_meta = ModelMeta.create_empty(dict(name='their/colours', modalities=['image', 'text'], similarity_fn_name=ScoringFunction(similarity)))
        def encode(self, inputs, **kwargs):
            rows = []
            for batch in inputs:
                texts = batch.get('text', ['']*len(batch['image']))
                rows += [[*np.asarray(i.convert('RGB')).mean((0, 1)), len(t)] for i, t in zip(batch['image'], texts)]
            return np.array(rows, np.float32)
    table = bridge.evaluate(world.folder, Colours())
    assert table.attrs['model'] == 'their/colours' and table.attrs['tied_queries'] == 0
    np.testing.assert_allclose(table.mteb, table.cirkit, rtol=0, atol=1e-5)


def local_task(category, queries, corpus):
    "A retrieval task in memory: the i-th query wants the i-th document."
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata
    q, d = ({'id': [f'{s}{i}' for i in range(len(next(iter(c.values()))))], **c} for s, c in (('q', queries), ('d', corpus)))
    class Local(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name=f'Local-{category}', description='A task in memory.', dataset={'path': 'memory', 'revision': '1'}, type='Any2AnyRetrieval',
            category=category, modalities=sorted({*queries, *corpus}), eval_langs=['eng-Latn'], main_score='ndcg_at_10', prompt='Find it.')
        def load_data(self, num_proc=None, **kwargs):
            relevant = {i: {j: 1} for i, j in zip(q['id'], d['id'])}
            self.dataset = {'default': {'test': {'queries': Dataset.from_dict(q), 'corpus': Dataset.from_dict(d), 'relevant_docs': relevant, 'top_ranked': None}}}
            self.data_loaded = True
    return Local()


@pytest.mark.mteb
@pytest.mark.parametrize('category', ['t2t', 'i2i', 't2i', 'i2t', 'it2t', 'it2i', 't2it', 'i2it', 'it2it'])
def test_our_embedder_runs_on_a_local_task(mteb, clip, world, category):
    pictures = [Image.open(world.path(c.image)) for c in world.gallery[:8]]
    texts = [f'a {c} {thing}' for c in ('red', 'blue') for thing in ('car', 'cat', 'tree', 'house')]
    asked, found = ({k: v for k, v in (('text', texts), ('image', pictures)) if k[0] in side} for side in category.split('2'))
    result = mteb.evaluate(bridge.as_encoder(clip), local_task(category, asked, found), cache=None, co2_tracker=False, show_progress_bar=False)
    scores = result.task_results[0].scores['test'][0]
    assert 0 < scores['ndcg_at_10'] <= 1 and (result.model_name, result.task_results[0].task_name) == ('cirkit/world-clip', f'Local-{category}')
    if category in ('t2t', 'i2i', 'it2it'): assert scores['recall_at_1'] == 1             # the same on both sides


@pytest.mark.mteb
def test_our_embedder_runs_on_a_task_of_mteb_with_data_in_memory(mteb, clip, world):
    task, ours = mteb.get_task('CIRRIT2IRetrieval'), bridge.as_task(world.folder)
    ours.load_data()
    task.dataset, task.data_loaded = {'default': {'test': ours.dataset['default']['test'] | {'top_ranked': None}}}, True
    result = mteb.evaluate(bridge.as_encoder(clip), task, cache=None, co2_tracker=False, show_progress_bar=False)
    assert 0 < result.task_results[0].get_score() < 1


@pytest.mark.mteb
def test_a_document_with_text_is_refused_where_it_would_be_dropped(mteb, colour):
    with pytest.raises(CirkitError, match="document 'd0' has a text"):
        mteb.evaluate(bridge.as_encoder(colour), local_task('i2t', {'image': [Image.new('RGB', (4, 4), 'red')]}, {'text': ['red']}),
                      cache=None, co2_tracker=False, show_progress_bar=False)


@pytest.mark.mteb
def test_another_fingerprint_is_another_revision(mteb, colour):
    a, b = (bridge.as_encoder(dataclasses.replace(colour, version=v)).mteb_model_meta for v in '12')
    assert a.name == b.name == 'cirkit/mean-colour' and a.revision != b.revision
