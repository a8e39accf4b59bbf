"""The ranks of a layer, which find each other and talk."""

from __future__ import annotations

import os
from typing import Any, Callable, List, Optional, TypeVar, Union

from . import _core

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
        cls,
        size: int,
        *,
        device: str = "cpu",
        timeout: float = 30.0,
        peer_memory: Optional[bool] = None,
    ) -> List["Communicator"]:
        """Ranks that are threads of this process: element r is rank r's.

        Args:
            size: how many.
            device: of all of them.
            timeout: seconds, of every wait; at most a year, because no rank waits for ever.
            peer_memory: as for join(). As all share the device, only True makes a difference.
        """
        handles = _core.thread_communicators(size, device, timeout, peer_memory)
        return [cls(handle) for handle in handles]

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
                send messages. Where rows or sums go so, by default too, all layers are made before
                the first call of one, or map_peers() is called before; steps of one communicator
                that overlap are an error, and steps or replays of graphs on several streams must
                be ordered by events of the caller.
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
        where layers are made later, call this before, with the largest Selection.peer_bytes(), or,
        of layers that differ in more than their tokens, with the sum of theirs.

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
