"""Expands the words of a bash script: variables, defaults, arrays, arithmetic, and paths next to the script."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bin.slime_scripts.syntax import (
    Word,
    ansi,
    computed,
    sequence,
    text_of,
    trimmed,
    unescaped,
    unquoted,
    whole_array,
)


class Words:
    """The variables of a script, and the expansion of its words."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.file = Path()  # that is read
        self.unset: dict[str, str] = {}  # arrays without a value, and where they were used
        self._given = given
        self._variables: dict[str, list[Word]] = {
            name: [Word(text=value, place="--var")] for name, value in given.items()
        }

    def place_of(self, node: Any) -> str:
        """Return "file:line" of a node."""
        return f"{self.file.name}:{node.start_point[0] + 1}"

    def assign(self, node: Any) -> None:
        """Follow an assignment to a variable or an array."""
        target = node.child_by_field_name("name")
        if target.type != "variable_name":  # one element of an array
            return
        name, values = text_of(target), self.assigned(node)
        if any(text_of(child) == "+=" for child in node.children):
            values = [*self._variables.get(name, []), *values]
        self.set(name, values)

    def assigned(self, assignment: Any) -> list[Word]:
        """Return the value of an assignment: one word, or the elements of an array."""
        value = assignment.child_by_field_name("value")
        if value is None:
            return [Word(text="", place=self.place_of(assignment))]
        if value.type == "array":
            return [word for child in value.named_children if child.type != "comment" for word in self.split(child)]
        return [self.joined(value)]

    def set(self, name: str, values: list[Word]) -> None:
        """Set a variable. What is missing gets the name of this variable, or the value that the user gave."""
        if len(values) == 1 and values[0].missing:
            if name in self._given:
                return
            values = [msgspec.structs.replace(values[0], missing=(name,))]
        self._variables[name] = values

    def knows(self, name: str) -> bool:
        """Whether a variable has a value without anything missing."""
        return name in self._variables and not any(word.missing for word in self._variables[name])

    def unknown(self, name: str, node: Any) -> Word:
        """Return the value of a variable that only the machine knows."""
        return Word(text="", place=self.place_of(node), missing=(name,))

    def split(self, node: Any) -> list[Word]:
        """Expand a node to words: whole arrays to their elements, unquoted variables split at spaces."""
        whole = whole_array(node)
        if whole is not None:
            if whole not in self._variables:
                self.unset[whole] = self.place_of(node)
            return [word for word in self._variables.get(whole, []) if word.text or word.missing]
        word = self.joined(node)
        if node.type in ("simple_expansion", "expansion", "command_substitution"):
            return [msgspec.structs.replace(word, text=text) for text in word.text.split()] or (
                [word] if word.missing else []
            )
        return [word]

    def joined(self, node: Any, *, unset_is_empty: bool = False) -> Word:
        """Expand a node to one word."""
        place = self.place_of(node)
        match node.type:
            case "raw_string":
                return Word(text=text_of(node)[1:-1], place=place)
            case "ansi_c_string":
                return Word(text=ansi(text_of(node)[2:-1]), place=place)
            case "simple_expansion":
                return self.value_of(text_of(node)[1:], node, unset_is_empty=unset_is_empty)
            case "expansion":
                return self._expansion(node, unset_is_empty=unset_is_empty)
            case "arithmetic_expansion":
                return self._arithmetic(node)
            case "command_substitution":
                return self._substituted(node)
            case "string" | "concatenation" | "command_name":
                return self._concatenated(node, unset_is_empty=unset_is_empty)
            case "process_substitution":
                return Word(text="", place=place, missing=("",))
            case _:
                return Word(text=unescaped(text_of(node)), place=place)

    def _concatenated(self, node: Any, *, unset_is_empty: bool) -> Word:
        """Join the parts of a string or word, with the text between them."""
        text, place = "", self.place_of(node)
        missing: list[str] = []
        start, end = node.start_byte, node.end_byte
        if node.type == "string":
            start, end = start + 1, end - 1
        source, position = node.text, start
        for child in node.named_children:
            if child.type == "string_content":
                continue
            text += unquoted(source[position - node.start_byte : child.start_byte - node.start_byte], node.type)
            part = self.joined(child, unset_is_empty=unset_is_empty)
            text += part.text
            missing += part.missing
            position = child.end_byte
        text += unquoted(source[position - node.start_byte : end - node.start_byte], node.type)
        return Word(text=text, place=place, missing=tuple(dict.fromkeys(missing)))

    def value_of(self, name: str, node: Any, *, unset_is_empty: bool = False) -> Word:
        """Return a variable's value. Without one it is missing, since an empty value is hardly meant."""
        place = self.place_of(node)
        if name not in self._variables:
            if name in ("0", "BASH_SOURCE"):
                return Word(text=str(self.file), place=place)
            return Word(text="", place=place, missing=() if unset_is_empty else (name,))
        words = self._variables[name]
        missing = tuple(dict.fromkeys(lacking for word in words for lacking in word.missing))
        return Word(text=" ".join(word.text for word in words), place=place, missing=missing)

    def _expansion(self, node: Any, *, unset_is_empty: bool) -> Word:
        """Expand ${NAME}, ${NAME:-default} and the like; other forms are missing."""
        found = re.match(r"\$\{(\w+)(\[[^]]*\])?(.*)\}$", text_of(node), re.DOTALL)
        if found is None:  # ${#NAME}, ${!NAME}
            return Word(text="", place=self.place_of(node), missing=(text_of(node),))
        name, rest = found[1], found[3]
        alternatives = [child for child in node.named_children if child.type not in ("variable_name", "subscript")]
        other = self.joined(alternatives[0]) if alternatives else Word(text="", place=self.place_of(node))
        value = self.value_of(name, node, unset_is_empty=unset_is_empty)
        is_set = name in self._variables and (value.text != "" or bool(value.missing))
        if rest == "":
            return value
        if rest.startswith((":-", ":=", "-", "=")):
            return value if is_set else other
        if rest.startswith((":+", "+")):
            return other if is_set else Word(text="", place=value.place)
        if rest.startswith((":?", "?")):
            return value
        return trimmed(value, rest)

    def _arithmetic(self, node: Any) -> Word:
        inner = text_of(node).removeprefix("$((").removesuffix("))").removeprefix("$[").removesuffix("]")
        names = re.findall(r"\$?\{?([A-Za-z_]\w*)\}?", inner)
        values = {name: self.value_of(name, node) for name in names}
        missing = tuple(dict.fromkeys(lacking for value in values.values() for lacking in value.missing))
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda found: values[found[1]].text or "0", inner)
        result = None if missing else computed(filled)
        if result is None:
            return Word(text="", place=self.place_of(node), missing=missing or (text_of(node),))
        return Word(text=str(result), place=self.place_of(node))

    def _substituted(self, node: Any) -> Word:
        """Return the output of the few commands that scripts find their own folder with; others are missing."""
        place = self.place_of(node)
        if text_of(node).startswith("$((") and text_of(node).endswith(
            "))"
        ):  # the grammar reads some arithmetic as a command
            return self._arithmetic(node)
        statements = [child for child in node.named_children if child.type != "comment"]
        output = self._output(statements[0]) if len(statements) == 1 else None
        return output or Word(text="", place=place, missing=(text_of(node),))

    def _output(self, node: Any) -> Word | None:
        if node.type == "redirected_statement":
            return self._output(node.child_by_field_name("body"))
        if node.type == "list":
            words = [self._output(child) for child in (node.children[0], node.children[-1])]
            return (
                words[0] if text_of(node.children[-1]).strip() == "pwd" and text_of(node.children[1]) == "&&" else None
            )
        if node.type != "command":
            return None
        name, *arguments = [word for child in node.named_children for word in self.split(child)]
        arguments = [word for word in arguments if not (word.text.startswith("-") and not word.missing)]
        match name.text, arguments:
            case (("cd" | "realpath" | "readlink"), [word]):
                return msgspec.structs.replace(word, text=str((self.file.parent / word.text).resolve()))
            case "dirname", [word]:
                return msgspec.structs.replace(word, text=str(Path(word.text).parent))
            case "basename", [word]:
                return msgspec.structs.replace(word, text=Path(word.text).name)
            case "pwd", []:
                return Word(text=str(self.file.parent.resolve()), place=self.place_of(node))
            case "echo", [word]:
                return word
            case "seq", [first, *others, last] if len(others) < 2:
                return sequence(first, others, last)
            case _:
                return None
