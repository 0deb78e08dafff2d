"""The collective of all ranks: `fabric.collective`."""

from __future__ import annotations

from fabric.strategies.collectives.collective import Collective as Collective
