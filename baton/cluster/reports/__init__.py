"""Reports over many requests: counters and quantile sketches, per slot of time and group.

    Sketch   a mergeable quantile sketch (DDSketch, relative accuracy 1 %)
    Group    what is counted of the requests of one model, tenant and pair of workers
    Window   groups by slot of time, bounded in number; the oldest slots merge
    report   a window (or several, of several routers) → figures, series, rows

Plain Python, times passed in; JSON both ways, so that windows of routers merge anywhere.
"""

from baton.cluster.reports.collector import Collector
from baton.cluster.reports.group import Group, Key
from baton.cluster.reports.report import Filters, build_report
from baton.cluster.reports.sketch import Sketch
from baton.cluster.reports.window import Window

__all__ = ["Collector", "Filters", "Group", "Key", "Sketch", "Window", "build_report"]
