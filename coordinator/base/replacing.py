"""Changed copies of frozen records, faster than `dataclasses.replace`."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["replace"]

if TYPE_CHECKING:
    # mypy knows the fields of this one by its name.
    from dataclasses import replace
else:
    import dataclasses
    from functools import cache, cached_property

    def replace(record, /, **changes):
        """As `dataclasses.replace`; TypeError for a field that the record does not have.

        That calls the constructor, which sets each field of a frozen record on its own: for the state,
        which has half a hundred fields and changes with each event, that takes longer than its rules.
        """
        cls = type(record)
        names = _copied_fields(cls)
        if names is None:
            return dataclasses.replace(record, **changes)
        if not changes.keys() <= names:
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(changes.keys() - names))}")
        copy = object.__new__(cls)
        copy.__dict__.update(record.__dict__, **changes)
        return copy

    @cache
    def _copied_fields(cls):
        """The names of the fields; None if the constructor does more than set the attributes."""
        has_cache = any(
            isinstance(each, cached_property) for base in cls.__mro__ for each in vars(base).values()
        )
        own = "__new__" in vars(cls) or hasattr(cls, "__post_init__") or "__slots__" in vars(cls)
        fields = dataclasses.fields(cls)
        if has_cache or own or not all(field.init for field in fields):
            return None
        return frozenset(field.name for field in fields)
