"""What every model of a request's fields stands on. Knows no field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictFields(BaseModel):
    """Nothing is converted: "1" is no number and true is no integer."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
