"""Online updates: served models that follow the change logs of a trainer.

A `ChangeLog` per rank writes the rows that training changes to a `Sink`; a `LogFollower` applies
them to a served model between its lookups.
"""

from emblib.online.change_log import ChangeLog, ChangeLogError, WhenFull
from emblib.online.follower import Lag, LogFollower
from emblib.online.records import LogError
from emblib.online.sinks import DirectorySink, RedisSink, Sink

__all__ = [
    "ChangeLog",
    "ChangeLogError",
    "DirectorySink",
    "Lag",
    "LogError",
    "LogFollower",
    "RedisSink",
    "Sink",
    "WhenFull",
]
