from libai.config import defaults, schema


def test_every_key_has_a_doc_and_a_default_that_fits():
    for key in schema.settings():
        assert key.doc.endswith("."), key.path
        assert key.fit(key.default) == key.default, key.path


def test_defaults_are_fresh_each_time():
    first = defaults("train")
    first.amp.enabled = True
    assert defaults("train").amp.enabled is False
