"""An update is written twice: as a plain loop, which eager mode extends, and as a compiled graph.

The engine changes no object's class; a change of mode builds another step.
"""

import re

from source_checks import findings


def test_no_object_changes_its_class():
    assert findings(re.compile("__class__ = ").findall, "libai/engine") == {}


def test_an_update_is_written_twice():
    assert len(findings(re.compile(r"def update\(\s*self,\s*batches").findall, "libai")) == 2
