"""What a person watches: Textual screens and widgets, no logic. One file a screen.

To add a screen, write ``NAME.py`` here: functions from a ``Snapshot`` and the choices (``Ui``) to
lines, and one ``View`` that says its panels, its layout, its keys and what its cursor stands on
(``schedule.py`` is a plain one). Name it in ``SCREENS``: its number key, the bars, help, man page,
palette and ``--screen`` follow, and so do the tests that draw every screen; put what it shows
into ``tests/tui/scenes.py``, run ``pytest tests/tui --snapshot-update`` and look at the pictures.
"""

# The screens in the order of their number keys: the module, and the View in it.
SCREENS = {
    "overview": "Overview",
    "heatmap": "HeatmapView",
    "events": "EventsView",
    "recovery": "RecoveryView",
    "schedule": "ScheduleView",
    "traces": "TracesView",
}
