"""Named tuples as arguments of kernels: a call passes where a tuple is, and not all that it holds.

Left to itself, numba passes each field of a tuple on its own, and of an array seven numbers. Our
kernels get a hundred arrays, so each call between helpers, and there are thousands, moved hundreds
of numbers, of which most were not used. Compiling these moves took longer than all the rest.
"""

from typing import Any, NamedTuple, TypeVar

from numba.core import cgutils, types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)

Fields = TypeVar("Fields", bound=type[NamedTuple])


def by_reference(fields: Fields) -> Fields:
    """Make kernels get such named tuples by reference; they read fields by name, nothing else.

    The tuple lies in the frame of the call from Python, and helpers get its address. They cannot
    make such a tuple themselves, nor take it apart by position.
    """

    @typeof_impl.register(fields)
    def type_of(value: Any, context: Any) -> _Reference:
        each = [typeof_impl(field, context) for field in value]
        return _Reference(types.NamedTuple(each, fields))  # type: ignore[no-untyped-call]

    return fields


class _Reference(types.Type):
    """Type of the address of a named tuple."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        super().__init__(f"reference to {whole}")  # the name decides which types are equal


@register_model(_Reference)
class _ReferenceModel(models.PrimitiveModel):
    """How a reference is held: as a pointer to the values of the fields."""

    def __init__(self, manager: Any, reference: _Reference) -> None:
        values = manager.lookup(reference.whole).get_value_type()
        super().__init__(manager, reference, values.as_pointer())  # type: ignore[no-untyped-call]


@infer_getattr
class _ReferenceFields(AttributeTemplate):
    key = _Reference

    def generic_resolve(self, reference: _Reference, name: str) -> Any:  # type: ignore[override]
        whole = reference.whole
        return whole.types[whole.fields.index(name)] if name in whole.fields else None


@lower_getattr_generic(_Reference)  # type: ignore[no-untyped-call, untyped-decorator]
def _read_field(context: Any, builder: Any, reference: _Reference, value: Any, name: str) -> Any:
    place = reference.whole.fields.index(name)
    address = cgutils.gep_inbounds(builder, value, 0, place)  # type: ignore[no-untyped-call]
    return builder.load(address)


@unbox(_Reference)  # type: ignore[no-untyped-call, untyped-decorator]
def _from_python(reference: _Reference, argument: Any, context: Any) -> NativeValue:
    values = context.unbox(reference.whole, argument)
    address = cgutils.alloca_once_value(context.builder, values.value)  # type: ignore[no-untyped-call]
    return NativeValue(address, values.is_error, values.cleanup)  # type: ignore[no-untyped-call]
