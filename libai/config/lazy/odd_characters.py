"""Characters that look like those of a key and are others: letters of another alphabet, wide or invisible ones."""

from __future__ import annotations

import unicodedata

#: letters that a reader cannot tell from the Latin one
_LOOKALIKES = str.maketrans(
    {
        **dict(zip("аеорсухіјѕԁһԛԝкмнтв", "aeopcyxijsdhqwkmhtb")),  # Cyrillic
        **dict(zip("АВЕКМНОРСТХІЈЅ", "ABEKMHOPCTXIJS")),
        **dict(zip("ανορικτυ", "avopiktu")),  # Greek
        "—": "--",
        "–": "-",
        "−": "-",
        "ı": "i",
        "\N{LATIN SMALL LETTER SHARP S}": "ss",
    }
)


def plain(text: str) -> str:
    """`text` in ASCII: look-alikes and wide characters replaced, accents, spaces and invisible characters dropped.

    >>> plain("tr\N{CYRILLIC SMALL LETTER A}in.se\N{ZERO WIDTH SPACE}ed")
    'train.seed'
    """
    replaced = unicodedata.normalize("NFKD", text.translate(_LOOKALIKES))
    digits = "".join(str(unicodedata.digit(character, character)) for character in replaced)
    return "".join(character for character in digits if "!" <= character <= "~")


def odd_character(text: str) -> str:
    """The first character of `text` that no key has, with its name; the empty string when there is none."""
    for character in text:
        if "!" <= character <= "~":
            continue
        if character == " ":
            return "a space"
        name = unicodedata.name(character, "")
        code = f"U+{ord(character):04X}{', ' + name if name else ''}"
        is_visible = character.isprintable() and not character.isspace()
        return f"the character {character!r} ({code})" if is_visible else f"an invisible character ({code})"
    return ""
