"""Privacy-pFedC: pFedC whose server adds up branches and label presence without being able to read them.

    client:  Enc(w_i^c * pi_i^c), Enc(pi_i^c)      server:  adds ciphertexts
    client:  w_i^c <- Dec(sum_n w_n^c * pi_n^c) / Dec(sum_n pi_n^c), if pi_i^c = 1

Anonymous: Disentangled Knowledge Transfer: A New Perspective for Personalized Federated Learning. Under review, 2022,
appendix 7.4. CKKS: Cheon, Kim, Kim, Song: Homomorphic Encryption for Arithmetic of Approximate Numbers. ASIACRYPT 2017.

Differences from the paper: those of pFedC. The counts, which the paper's listing does not divide by, are encrypted
too. Every client also seals the means that it received, so that a class without a participant keeps its last one: the
server cannot see that there was none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from perfed.core.client import Client, Update
from perfed.core.method import Method
from perfed.core.plan import Part, Round
from perfed.core.registry import register
from perfed.core.server import Peer, Server
from perfed.core.state import SEALED, Selection, State
from perfed.core.state import check as check_schema
from perfed.errors import StoreError
from perfed.methods.pfedc import PFedC, mean_of_holders
from perfed.nets.branches import head_names
from perfed.nets.net import Net
from perfed.privacy import ckks

BRANCH, BODY = f"{SEALED}branch", f"{SEALED}body"
SIZE_UNIT = 1024
"""samples by which data sizes are divided before they are multiplied with a body, to keep sums in range"""


@register("privacypfedc")
@dataclass(frozen=True, kw_only=True)
class PrivacyPFedC(PFedC):
    """Branches and label presence are sealed; only clients can open their sums."""

    keys: str = ""
    """file with the clients' secret key, made on first use and never read by the server; empty: one file per user"""
    encrypt_body: bool = False
    """whether the body is sealed too, and its weight; counts of samples beside the update stay open"""

    title = "Privacy-pFedC"
    cites = (
        "Anonymous: Disentangled Knowledge Transfer: A New Perspective for Personalized Federated Learning. 2022."
        " CKKS: Cheon, Kim, Kim, Song: Homomorphic Encryption for Arithmetic of Approximate Numbers. ASIACRYPT 2017"
    )
    keeps = "the branches of classes that the client does not have, and the secret key"
    scalars = ("cost.decrypt_seconds", "cost.encrypt_seconds", "cost.ciphertext_bytes")
    labels_stay = True
    sends = "the body, and sealed: the branches of the client's classes and which classes these are"

    def build(self, net: Net) -> Net:
        """Branches in the place of the head, if there is a package to seal them with."""
        ckks.tenseal()
        return super().build(net)

    def travels(self, part: Part, round: Round, shared: Selection) -> Selection:
        """Nothing travels openly if the body is sealed."""
        return False if self.encrypt_body else shared

    # A client's round

    def train(self, client: Client) -> Update:
        """Open the sums, train, and seal what the next ones are made of."""
        started = perf_counter()
        means = self.unseal(client)
        opened = perf_counter()
        self.fit(client, self.phases(client))
        trained = perf_counter()
        sealed = self.seal(client, means)
        done = perf_counter()
        update = client.update(extra=sealed, weight=1.0 if self.encrypt_body else None)
        update.scalars |= {
            "cost.decrypt_seconds": opened - started,
            "cost.encrypt_seconds": done - trained,
            "cost.ciphertext_bytes": sum(tensor.numel() for tensor in sealed.values()),  # of the upload
        }
        return update

    def rehearse(self, client: Client) -> None:
        """Without opening and sealing, which need the key."""
        self.fit(client, self.phases(client))

    def personal(self, client: Client) -> None:
        """The held branches are the opened means, the others the client's own."""
        self.unseal(client)

    def unseal(self, client: Client) -> State:
        """Put the opened means of the held branches, and of the body if sealed, into the network; return all means."""
        initial = client.plan.initial
        means = {name: initial[name] for name in head_names(client.net)}
        if (sealed := client.received.get(BRANCH)) is not None and sealed.any():
            means = self.means(ckks.keyring(self.keys), sealed, means, client.num_clients)
        if (sealed := client.received.get(BODY)) is not None and sealed.any():
            like = {name: initial[name] for name in self.body_names(client.net)}
            values = ckks.keyring(self.keys).open(sealed, size_of(like) + 1)
            client.load(shaped(values[:-1] / values[-1], like))
        self.take_over(client, means)
        return means

    @staticmethod
    def means(keys: ckks.Keyring, sealed: Tensor, like: State, clients: int) -> State:
        """Every branch's mean over its holders, or the mean before where there were none."""
        size, rows = size_of(like), len(next(iter(like.values())))
        total, count, before, n = keys.open(sealed, 2 * size + rows + 1).split_with_sizes([size, rows, size, 1])
        whole, n = count.round(), n.round()
        if not bool((((count - whole).abs() < 1e-3) & (whole >= 0) & (whole <= n) & (n >= 1) & (n <= clients)).all()):
            raise StoreError(
                f"The sums of this run cannot be opened with the key in {keys.path}.",
                "Set keys to the file with which the run began.",
            )
        sums, last = shaped(total, like), shaped(before / n, like)
        return {name: mean_of_holders(sums[name], whole, last[name]).to(like[name].dtype) for name in like}

    def seal(self, client: Client, means: State) -> State:
        """The held branches, pi_i, the means before and a 1; with `encrypt_body` also size times body, and size."""
        branches, held = self.contribution(client)
        parts = {BRANCH: torch.cat([flat(branches), held.double(), flat(means), torch.ones(1, dtype=torch.float64)])}
        if self.encrypt_body:
            state, share = client.weights(), torch.tensor([client.size / SIZE_UNIT], dtype=torch.float64)
            body = flat({name: state[name] for name in self.body_names(client.net)})
            parts[BODY] = torch.cat([share * body, share])
        keys = ckks.keyring(self.keys)
        return {name: keys.seal(values, client.num_clients) for name, values in parts.items()}

    def body_names(self, net: Net) -> list[str]:
        """The tensors that are averaged as the body."""
        parameters = {name for name, _ in net.module.named_parameters()}
        own = net.names(*net.body)
        return [
            name
            for name, tensor in net.module.state_dict().items()
            if name in own and tensor.is_floating_point() and (name in parameters or self.buffers == "average")
        ]

    # The server's side: ciphertexts go in and out, no key is there

    def start(self, net: Net, clients: int, initial: State) -> State:
        """No sums yet: empty ciphertexts."""
        branches = {name: initial[name] for name in head_names(net)}
        counts = {BRANCH: 2 * size_of(branches) + len(next(iter(branches.values()))) + 1}
        if self.encrypt_body:
            counts[BODY] = size_of({name: initial[name] for name in self.body_names(net)}) + 1
        empty = {name: torch.zeros(ckks.rows(n), ckks.FRAME, dtype=torch.uint8) for name, n in counts.items()}
        return Method.start(self, net, clients, initial) | empty

    def send(self, server: Server, peer: Peer, round: Round) -> State:
        """The body and the sums."""
        return super().send(server, peer, round) | sealed_in(server.state)

    def schema(self, server: Server, round: Round) -> State:
        """The body, and ciphertexts like the sums."""
        return Method.schema(self, server, round) | sealed_in(server.state)

    def verify(self, server: Server, state: State, sender: str, round: Round) -> None:
        """Ciphertexts must be of the scheme; what they say cannot be checked."""
        check_schema(state, self.schema(server, round), sender)
        for sealed in sealed_in(state).values():
            ckks.check(sealed, sender)

    def combine(self, server: Server, updates: Sequence[Update], round: Round) -> State:
        """The bodies' mean by data size, and sums of ciphertexts."""
        bodies = [replace(u, state={n: v for n, v in u.state.items() if n in server.plan.parts}) for u in updates]
        sums = {name: ckks.add([u.state[name] for u in updates]) for name in sealed_in(server.state)}
        return Method.combine(self, server, bodies, round) | sums


def sealed_in(state: Mapping[str, Tensor]) -> State:
    """The ciphertexts of a state."""
    return {name: tensor for name, tensor in state.items() if name.startswith(SEALED)}


def size_of(state: State) -> int:
    """The number of values."""
    return sum(tensor.numel() for tensor in state.values())


def flat(state: Mapping[str, Tensor]) -> Tensor:
    """All values in one vector of double precision."""
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def shaped(values: Tensor, like: State) -> State:
    """The inverse of `flat`, still in double precision."""
    parts = values.split_with_sizes([tensor.numel() for tensor in like.values()])
    return {name: part.view(like[name].shape) for (name, part) in zip(like, parts, strict=True)}
