"""Numbers within bounds, which pydantic checks; apart from units, because it is slow to import."""

from typing import Annotated, TypeAlias

from annotated_types import Ge, Gt, Le

Positive: TypeAlias = Annotated[float, Gt(0)]
NonNegative: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
Count: TypeAlias = Annotated[int, Gt(0)]
