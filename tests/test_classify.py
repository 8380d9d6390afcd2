"The rule classifier and the model interface on sentences made for this file."
import pytest
from hypothesis import given, settings, strategies as st
from cirkit.audit.classify import UNPARSED, Label, RuleClassifier, distribution, label
from cirkit.audit.classify_llm import LLMClassifier
from cirkit.audit.classify_measured import comparison, hand_labels, measured
from cirkit.errors import CirkitError
from cirkit.taxonomy import SIMPLE, SUBCATEGORIES

CASES = {
    'color': ["Make the lantern purple.", "is darker than before", "has a bluer hue", "The barrel is green instead of red",
              "Change the colour of the kite to yellow", "the roof is no longer orange, it is white", "has the same shape but a different color"],
    'material': ["is made of wood", "The spoon should be metallic", "Turn the dome to glass", "looks shinier", "the boat is made from ice-cold steel"],
    'shape': ["has longer sleeves", "is sleeveless", "Make the tower taller", "the balloon is bigger", "has a round shape", "with a scooped neckline",
              "no collar"],
    'texture': ["is striped", "has polka dots", "Has a floral print", "The scarf is checkered now", "with a big logo and lettering", "is plainer"],
    'addition': ["Add a lighthouse.", "There is a bench next to it", "has one duck behind it", "wears a feathered hat", "shows a ladder",
                 "Place a red kettle on the stove", "has a blue ribbon"],
    'remove': ["Remove the ladder", "has no lid", "without any sails", "The anchor is gone", "does not have a chimney", "is not wearing a cap",
               "Get rid of the two red barrels", "shows no ships"],
    'replace': ["Replace the goat with a camel", "has a kettle instead of a teapot", "Change the swan to a heron", "shows a different animal",
                "Turn the cart into a sleigh", "is taken indoors", "the background is a canyon", "it is a tuba rather than a drum"],
    'count': ["There are three lanterns", "has fewer boats", "shows more camels", "Only one of them", "are two", "one more kettle", "one less barrel"],
    'spatial': ["is on top of the barrel", "Put the teapot to the left of the lamp", "is next to the well", "Move the anchor under the pier",
                "is upside down"],
    'action': ["The goat is jumping", "is sitting on the fence", "has the clown juggle", "Make the horse run", "is not looking at the camera",
               "the otter swims in the river"],
    'viewpoint': ["is seen from above", "Zoom in", "A close-up", "is shot from a different angle", "the photo is taken from the side"],
    'style': ["is in greyscale", "as a watercolor painting", "is more formal", "The photo is in color", "make it a pencil sketch"],
    'time': ["is taken at night", "at sunset", "The picture is darker", "during the day"],
    'weather': ["It is raining", "is covered in snow", "the sky is cloudy", "in thick fog"],
    'complex': ["Add a duck and make the boat red", "has no lid and is seen from above", "is striped and has longer sleeves", "are two and it is night",
                "The goat runs, the barrel is green and there is snow", "has a camel instead of a goat and is shot at night"],
    UNPARSED: ["", "   ", "the same", "keep the red boat", "has the same color", "...", "from the same angle"],
}

@pytest.mark.parametrize(('expected', 'text'), [(name, text) for name, texts in CASES.items() for text in texts])
def test_own_sentences(expected, text):
    assert label(text).name == expected

def test_several_kinds_are_kept():
    assert label("has a lid instead of a cork, is blue and is seen from above").kinds == ('color', 'replace', 'viewpoint')
    assert label("Add a big red drum made of oak").kinds == ('addition',)
    assert label("one goat sits next to two lanterns at night").kinds == ('action', 'time')

@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(st.sampled_from(" ".join(t for ts in CASES.values() for t in ts).split()), max_size=15).map(' '.join)))
def test_any_text_has_one_label(text):
    found = label(text)
    assert found.name in (*SUBCATEGORIES, UNPARSED) and set(found.kinds) <= set(SIMPLE)
    assert found == label(text) == RuleClassifier().classify([text])[0]

def test_long_text_is_quick_and_labelled():
    assert label("is red and has a drum, " * 2000).kinds == ('color', 'addition')

class Replies:
    "A model that gives the next reply of a list to each prompt."
    def __init__(self, *replies): self.replies = iter(replies)
    def complete(self, prompts): return [next(self.replies) for _ in prompts]

def test_model_is_asked_again_and_gives_up():
    asker = LLMClassifier(Replies("color", "er", "Count."), retries=1)
    assert [l.name for l in asker.classify(["a", "b"])] == ['color', 'count'] and asker.asked == 3
    never = LLMClassifier(Replies(*["it depends"] * 3), retries=2)
    [lost] = never.classify(["a"])
    assert lost.name == UNPARSED and "'it depends'" in lost.note and never.asked == 3
    with pytest.raises(CirkitError, match="tries: 1"): LLMClassifier(Replies("it depends"), retries=0, strict=True).classify(["a"])

def test_distribution_counts_labels():
    frame = distribution([Label(('color',)), Label(('color', 'count')), Label()]).set_index('subcategory')
    assert frame['count'][frame['count'] > 0].to_dict() == {'color': 1, 'complex': 1, UNPARSED: 1}
    assert frame.asked[['color', 'count', 'complex']].tolist() == [2, 1, 1] and (frame.n == 3).all()

def test_stored_tables_belong_to_the_labels():
    for part in ('development', 'held-out'):
        labels, table = hand_labels(part), measured(part).set_index('subcategory')
        assert len(labels) == 168 and table.support['exact'] == 168
        for kind in SIMPLE: assert table.support[kind] == sum(kind in kinds for kinds in labels.labels)
    frame = comparison()
    assert frame.groupby('benchmark')['count'].sum().to_dict() == {'circo': 1020, 'cirr': 8329, 'fashioniq': 6016}
    assert (frame.asked >= frame['count']).all()
