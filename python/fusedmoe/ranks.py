"""The ranks of a layer: communicators, and which rank holds which expert."""

from __future__ import annotations

import os
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, TypeVar, Union

from . import _core
from ._arrays import Array, array, invalid

T = TypeVar("T")


class Communicator:
    """The ranks of a layer, seen from one of them.

    A failure is final: every call of every rank then raises RuntimeError with the same reason. What
    a handler of signals raises in a wait, as Ctrl-C does, ends the communicator too.
    """

    def __init__(self, handle: _core.Communicator) -> None:
        self._handle = handle

    @classmethod
    def threads(
        cls, size: int, *, device: str = "cpu", timeout: float = 30.0
    ) -> List["Communicator"]:
        """Ranks that are threads of this process: element r is rank r's.

        Args:
            size: how many.
            device: of all of them.
            timeout: seconds, of every wait; at most a year, because no rank waits for ever.
        """
        return [cls(handle) for handle in _core.thread_communicators(size, device, timeout)]

    @classmethod
    def join(
        cls,
        rank: int = 0,
        size: int = 1,
        address: Optional[str] = None,
        port: int = 0,
        *,
        token: Optional[str] = None,
        device: str = "cpu",
        timeout: float = 30.0,
        shared_memory: bool = True,
        peer_memory: Optional[bool] = None,
    ) -> "Communicator":
        """A process among others, over TCP; every rank calls it.

        On CUDA messages go over NCCL; rows between GPUs of one host go through their memory, see
        peer_memory.

        Rank 0 listens at the port of the address. Without an address all of it is what torchrun,
        mpirun or srun has set.

        Args:
            rank: of this process.
            size: how many ranks there are.
            address: of rank 0's host.
            port: at which rank 0 listens.
            token: with an address, a secret of 16 to 64 characters, the same on all ranks,
                without which nobody is let in; default: that in the variable FUSEDMOE_TOKEN. Only
                where the address is of this host alone, as 127.0.0.1 is, there may be none.
            device: of this rank, "cpu" or "cuda:0".
            timeout: seconds, of every wait.
            shared_memory: processes of one host share memory on the CPU. Where it is False on one
                rank, all send messages.
            peer_memory: rows between GPUs of one host go through their memory: None, where each
                rank has a GPU to itself; True, also where ranks share one. False on one rank: all
                send messages. Layers then are made, the largest first, before the first forward.
                Where rows or sums go so, by default too, steps of one communicator that overlap are
                an error, and steps or replays of graphs on several streams must be ordered by
                events of the caller.
        """
        return cls(
            _core.join_communicator(
                rank,
                size,
                address or "",
                port,
                token or "",
                device,
                timeout,
                shared_memory,
                peer_memory,
            )
        )

    @classmethod
    def from_gather(
        cls,
        rank: int,
        size: int,
        gather: Callable[[str], List[str]],
        *,
        device: str = "cpu",
        timeout: float = 30.0,
        shared_memory: bool = True,
        peer_memory: Optional[bool] = None,
    ) -> "Communicator":
        """The same, where the ranks find each other by an engine's own collective.

        Args:
            rank: of this process.
            size: how many ranks there are.
            gather: takes this rank's text, returns those of all ranks; called twice.
            device: as for join(), and so are the others.
            timeout: seconds, of every wait.
            shared_memory: on the CPU, among processes of one host.
            peer_memory: between GPUs of one host.
        """
        return cls(
            _core.create_communicator(
                rank, size, gather, device, timeout, shared_memory, peer_memory
            )
        )

    @classmethod
    def from_torch(
        cls,
        group: Any = None,
        *,
        device: str = "cpu",
        timeout: float = 30.0,
        shared_memory: bool = True,
        peer_memory: Optional[bool] = None,
    ) -> "Communicator":
        """The ranks of a process group of torch.distributed, default: all."""
        import torch.distributed as dist

        def gather(text: str) -> List[str]:
            texts: List[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(texts, text, group=group)
            return texts

        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls(
            _core.create_communicator(
                rank, size, gather, device, timeout, shared_memory, peer_memory
            )
        )

    @classmethod
    def from_mpi(
        cls,
        comm: Any = None,
        *,
        device: str = "cpu",
        timeout: float = 30.0,
        shared_memory: bool = True,
        peer_memory: Optional[bool] = None,
    ) -> "Communicator":
        """The ranks of a communicator of mpi4py, default: MPI.COMM_WORLD.

        They find each other by its allgather. Rows then go through memory that they share or over
        TCP. On CUDA messages go over NCCL; rows between GPUs of one host go through their memory,
        see peer_memory of join().
        """
        if comm is None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        rank, size = comm.Get_rank(), comm.Get_size()
        gather = comm.allgather
        return cls(
            _core.create_communicator(
                rank, size, gather, device, timeout, shared_memory, peer_memory
            )
        )

    @classmethod
    def from_folder(
        cls,
        rank: int,
        size: int,
        folder: Union[str, "os.PathLike[str]"],
        *,
        device: str = "cpu",
        timeout: float = 30.0,
        shared_memory: bool = True,
        peer_memory: Optional[bool] = None,
    ) -> "Communicator":
        """As join(), where the ranks find each other by files in a folder that all of them see.

        The folder is empty, or does not exist yet. It belongs to the user of the ranks, and nobody
        else may write in it. It may go when all ranks have ended.
        """
        return cls(
            _core.create_communicator_in_folder(
                rank, size, os.fspath(folder), device, timeout, shared_memory, peer_memory
            )
        )

    @classmethod
    def from_nccl(
        cls,
        comm: int,
        rank: int,
        size: int,
        gather: Callable[[str], List[str]],
        *,
        device: str = "cuda:0",
        timeout: float = 30.0,
        peer_memory: Optional[bool] = None,
    ) -> "Communicator":
        """As from_gather(), with a communicator of NCCL that the caller has.

        Messages go over it; with peer_memory=False all rows do.

        Args:
            comm: its address (ncclComm_t). It must outlive this object, be of the libnccl.so.2
                that this process has loaded, and be of this rank, as many ranks and the device,
                else all ranks get an error. It is aborted when ranks fail.
            rank: of this process.
            size: how many ranks there are.
            gather: takes this rank's text, returns those of all ranks; called twice.
            device: of this rank.
            timeout: seconds, of every wait.
            peer_memory: as for join().
        """
        return cls(
            _core.create_communicator_with_nccl(
                rank, size, gather, comm, None, device, timeout, peer_memory
            )
        )

    @classmethod
    def from_nccl_id(
        cls,
        unique_id: bytes,
        rank: int,
        size: int,
        gather: Callable[[str], List[str]],
        *,
        device: str = "cuda:0",
        timeout: float = 30.0,
        peer_memory: Optional[bool] = None,
    ) -> "Communicator":
        """As from_gather(), with a new communicator of NCCL.

        Messages go over it; with peer_memory=False all rows do.

        Args:
            unique_id: what make_nccl_id() has given one rank, which has told it to all.
            rank: of this process.
            size: how many ranks there are.
            gather: takes this rank's text, returns those of all ranks; called twice.
            device: of this rank.
            timeout: seconds, of every wait.
            peer_memory: as for join().
        """
        return cls(
            _core.create_communicator_with_nccl(
                rank, size, gather, None, unique_id, device, timeout, peer_memory
            )
        )

    @staticmethod
    def make_nccl_id() -> bytes:
        """A new ncclUniqueId."""
        return _core.make_nccl_unique_id()

    @property
    def rank(self) -> int:
        return self._handle.rank()

    @property
    def size(self) -> int:
        return self._handle.size()

    @property
    def backend(self) -> str:
        """What moves rows: "threads", "tcp" or "nccl"."""
        return self._handle.backend()

    @property
    def status(self) -> str:
        """Why the communicator has ended; empty while it works."""
        return self._handle.status()

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._handle.barrier()

    def connect(self) -> None:
        """Connects the ranks for messages now, on CUDA over NCCL. All call it.

        Without it that happens when a layer whose rows are messages is made.

        Raises:
            RuntimeError: on all ranks, where they cannot; the communicator stays usable.
        """
        self._handle.connect()

    def lane(self, number: int) -> "Communicator":
        """A second communicator of the same ranks. All call it.

        Its steps may overlap those of this one: it has memory of the GPUs of its own for them, but
        sends no messages. A failure in one ends both. layer.start_move(placement, over=lane) brings
        experts between the GPUs of a host beside calls of the layer.

        Args:
            number: which one, from 1 on, as `lane` of a call; of the same number it is the same.

        Raises:
            RuntimeError: on all ranks, where they give different numbers.
        """
        return Communicator(self._handle.lane(number))

    def map_peers(self, bytes: int) -> str:
        """Lets each rank's GPU lend the others so many bytes, or as many as before. All call it.

        Layers do so when they are made, but that memory cannot grow behind the first call of one:
        where larger layers are made later, call this before, with the largest
        Selection.peer_bytes().

        Returns:
            Why rows and sums go as messages instead; empty: they do not.

        Raises:
            RuntimeError: on all ranks, where they give different numbers of bytes; the communicator
                stays usable.
        """
        return self._handle.map_peers(bytes)

    def together(self, step: Callable[[], T]) -> T:
        """What step() returns, once all ranks have called theirs.

        If it raises on a rank, all raise RuntimeError with that rank's text, at once instead of at
        the deadline of what comes next; the communicator stays usable. step() must not wait for
        other ranks.
        """
        failure: Optional[Exception] = None
        try:
            result = step()
        except Exception as error:
            failure = error
        except BaseException:  # Ctrl-C
            self.abort("interrupted")
            raise
        try:
            self._handle.together("" if failure is None else str(failure) or repr(failure))
        except RuntimeError as error:
            raise error from failure
        return result

    def abort(self, reason: str) -> None:
        """Ends the communicator on all ranks."""
        self._handle.abort(reason)

    def __repr__(self) -> str:
        return f"fusedmoe.Communicator(rank {self.rank} of {self.size}, {self.backend})"


def linear_placement(num_experts: int, num_ranks: int, redundant: int = 0) -> str:
    """Consecutive experts on each rank, and copies of experts 0, 1, ... behind them, as JSON."""
    return _core.make_placement("linear", num_experts, num_ranks, redundant)


def round_robin_placement(num_experts: int, num_ranks: int) -> str:
    """Expert e on rank e % num_ranks, as JSON."""
    return _core.make_placement("round_robin", num_experts, num_ranks, 0)


class LoadWindow:
    """How many tokens chose each expert of some layers in the last calls: loads for balance().

    Args:
        num_layers: how many.
        num_experts: of each layer.
        num_calls: of a layer that count; older ones are forgotten.
    """

    def __init__(self, num_layers: int, num_experts: int, num_calls: int) -> None:
        self._handle = _core.LoadWindow(num_layers, num_experts, num_calls)
        self._num_experts = num_experts

    def add(self, layer: int, expert_load: Array) -> None:
        """Adds what a call of the layer has filled: (num_experts) int32."""
        self._handle.add(layer, array(expert_load))

    def loads(self, communicator: Optional[Communicator] = None) -> List[List[float]]:
        """(num_layers, num_experts): sums over the calls.

        Args:
            communicator: sums over its ranks too, the same on all, which all call this.
        """
        sums = self._handle.loads(None if communicator is None else communicator._handle)
        each = self._num_experts
        return [sums[begin : begin + each] for begin in range(0, len(sums), each)]

    def clear(self) -> None:
        """Forgets all calls."""
        self._handle.clear()


class BalancedLayer(NamedTuple):
    """What balance() makes of a layer's loads."""

    placement: str
    """JSON, for placement= of a layer."""
    before: float
    """Load of the busiest rank over the mean of all, with the placement that there was."""
    after: float
    """The same with the new placement; 1 is even, 0 without loads."""


def balance(
    loads: Any,
    num_ranks: int,
    *,
    redundant: int = 0,
    num_hosts: int = 1,
    num_groups: int = 0,
    placements: Sequence[str] = (),
) -> List[BalancedLayer]:
    """Spreads the experts of each layer over ranks by DeepSeek's algorithm (EPLB).

    Args:
        loads: (layers, experts), tokens that chose each, or (experts) of one layer: lists, or an
            array that has tolist().
        num_ranks: each holds equally many experts.
        redundant: copies beyond one of each expert; the busiest are copied.
        num_hosts: above 1, each host holds whole groups, and the copies of an expert share a host.
        num_groups: consecutive experts of equal number; 0: each is one of its own.
        placements: what the ranks hold now, one for all layers or one for each. An expert that
            stays on its rank keeps its place there. Empty: linear_placement().
    """
    rows = _rows_of(loads)
    if any(len(row) != len(rows[0]) for row in rows):
        raise invalid("loads", "loads: the layers have different numbers of experts")
    layers = _core.balance(
        [load for row in rows for load in row],
        len(rows[0]),
        num_ranks,
        redundant,
        num_hosts,
        num_groups,
        list(placements),
    )
    return [BalancedLayer(*layer) for layer in layers]


def _rows_of(loads: Any) -> List[List[float]]:
    """A list for each layer."""
    try:
        rows = loads.tolist() if hasattr(loads, "tolist") else list(loads)
        if not rows or not hasattr(rows[0], "__len__"):
            rows = [rows]
        return [[float(load) for load in row] for row in rows]
    except (TypeError, ValueError):
        found = type(loads).__name__
        message = f"loads: was a {found}; must be numbers, (layers, experts)"
        raise invalid("loads", message) from None
