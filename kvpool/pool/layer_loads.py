"""LayerLoads: the content of one admission on its way from the host, some layers after the others, and the waits for
them."""

from __future__ import annotations

from kvpool.arrays.layout import integer_argument
from kvpool.device.base import Event, Layers, Stream, StreamLike
from kvpool.entry.interrupt import DeferSignals
from kvpool.pool.core import Core

PARTS_MAX = 1 << 16


class LayerLoads:
    """What an admission with ``loads=`` brings from the host, part after part of the layers. ``layer_loads`` makes it.
    Thread-safe; one admission at a time.

    Call ``wait`` for each layer before its kernel is enqueued: until then, its blocks may hold anything. If another
    call says what was done on the stream, as ``commit`` and ``release`` do, the stream waits for all layers first. So
    make such calls before the admission, or behind the last layer.

    Attributes
    ----------
    stream
        That of the admission.
    parts
        In how many parts of the layers it comes.
    events
        One for each part, or none where nothing is on its way.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=4, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, host_blocks=8, device="cpu") as cache:
    ...     loads = cache.layer_loads(parts=2)
    ...     found = cache.add_sequence_batch([[1, 2, 3, 4, 5]], loads=loads)
    ...     for layer in range(4):
    ...         loads.wait(layer)  # then enqueue the kernels of that layer
    ...     cache.commit(found.ids)
    ...     cache.release(found.ids)
    """

    def __init__(self, core: Core, stream: Stream, parts: int) -> None:
        self.core, self.stream, self.parts = core, stream, parts
        self.events: list[Event] = []

    def wait(self, layer: int, *, stream: StreamLike = None, group: int | None = None) -> None:
        """Have work that is enqueued from now on wait for a layer. The caller does not wait.

        Parameters
        ----------
        layer
            Counted in its group, over all layouts of the group.
        stream
            Which stream waits: that of the admission by default.
        group
            The index of a group of layers, required where there are several.

        Raises
        ------
        TypeError, ValueError
            For a layer or a group that the pool does not have, and for a stream on which no work can be enqueued.
        DeviceError, PoolClosed
            Where the device fails; after ``close``.
        """
        config = self.core.config
        layers = sum(layout.layers for layout in config.groups[config.group(group)].layouts)
        layer = integer_argument("layer", layer, 0, layers - 1)
        on = self.core.as_stream(self.stream if stream is None else stream)
        events = self.events  # another admission may begin meanwhile
        if events:
            with DeferSignals():
                self.core.transfer.wait_for(on, events[Layers.that_has(layer, layers, self.parts)])


def loads_argument(core: Core, loads: object, stream: object) -> Stream:
    """The stream of an admission with ``loads``. Raises TypeError, ValueError: for those of another pool, and for a
    ``stream`` beside them."""
    if not isinstance(loads, LayerLoads):
        raise TypeError(f"loads={loads!r:.80}: accepted is what layer_loads gave")
    if loads.core is not core or stream is not None:
        raise ValueError("loads: accepted is what layer_loads of this pool gave; it has the stream, so stream= is None")
    return loads.stream
