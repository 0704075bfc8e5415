"""pFedSD: FedAvg's server, a teacher that is the client's own last model, and that model scored."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from perfed import nets
from perfed.core.registry import make
from perfed.core.state import State, under, within
from perfed.data import Federation
from tests.conftest import small_net
from tests.runs import alike, at_work, personal, shaken, stepped, whole


def initial(digits: Federation, net: str = "mlp") -> State:
    return {name: t.clone() for name, t in small_net(digits, net).module.state_dict().items()}


@pytest.mark.parametrize("net", ["mlp", "batchnorm"])
def test_without_distillation_the_global_model_is_fedavgs_to_the_bit(net: str, digits: Federation) -> None:
    """With BatchNorm this also says that the teacher leaves the student's statistics alone."""
    hyper = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
    ours = stepped(make("pfedsd", lam=0.0, **hyper), digits, net=net, fraction=1.0)
    assert alike(ours.server.state, stepped(make("fedavg", **hyper), digits, net=net, fraction=1.0).server.state)
    assert not alike(ours.server.state, stepped(make("pfedsd", **hyper), digits, net=net, fraction=1.0).server.state), (
        "the default is not the limit"
    )


def test_a_step_by_hand_under_the_last_personal_model(digits: Federation) -> None:
    method = make("pfedsd", lr=0.1, lam=0.7, tau=3.0, batch_size=10_000, epochs=1)
    w, v = shaken(initial(digits), 1), shaken(initial(digits), 2)
    client = at_work(method, digits, received=w, private=under("v", v), since=1, t=2)
    teacher, student, batch = small_net(digits), small_net(digits), whole(client)
    teacher.module.load_state_dict(v)
    student.module.load_state_dict(w)
    p = (teacher(batch.x) / 3).softmax(dim=1).detach()
    logits = student(batch.x)
    q = (logits / 3).softmax(dim=1)
    kl = (p * (p / q).log()).sum(dim=1).mean()
    (F.cross_entropy(logits, batch.y) + 0.7 * 9 * kl).backward()
    update = method.train(client)
    for name, s in student.module.named_parameters():
        assert s.grad is not None
        torch.testing.assert_close(update.state[name], w[name] - 0.1 * s.grad, rtol=0, atol=1e-5)
        assert torch.equal(client.memory[f"v/{name}"], update.state[name])


def test_the_first_round_has_no_teacher(digits: Federation) -> None:
    ours, theirs = (stepped(make(name, lr=0.05), digits, rounds=1) for name in ("pfedsd", "fedavg"))
    assert alike(ours.server.state, theirs.server.state)


@pytest.mark.parametrize("mode", ["batchnorm", "dropout"])
def test_the_teacher_is_in_eval_mode_on_its_own_buffers(mode: str, digits: Federation) -> None:
    """In train mode it would use a batch's statistics, or drop units, and differ from its own prediction."""
    torch.manual_seed(0)
    shape, classes = digits.input_shape, digits.num_classes
    dropping = nets.build("mlp", shape, classes, hidden=[16], dropout=0.5)
    net = dropping if mode == "dropout" else small_net(digits, "batchnorm")
    v = shaken({n: t.clone() for n, t in net.module.state_dict().items()}, 2)
    v = {n: t.abs() if n.endswith("running_var") else t for n, t in v.items()}
    method = make("pfedsd", lr=1e-12, lam=1.0)
    client = at_work(method, digits, net=net, received=v, private=under("v", v), since=1, t=2)
    (phase,) = method.phases(client)
    assert phase.loss is not None
    batch = whole(client)
    client.net.module.eval()
    with torch.no_grad():
        together = phase.loss(client, batch)
        torch.testing.assert_close(together, F.cross_entropy(client.net(batch.x), batch.y), rtol=0, atol=1e-5)
    assert alike(client.weights(), v), "and the student's buffers are untouched"


def test_the_last_local_model_is_scored(digits: Federation) -> None:
    simulation = stepped(make("pfedsd", lr=0.05), digits)
    for i in range(digits.num_clients):
        since, memory = simulation.store.client(i)
        own = within("v", memory) if since else simulation.server.state
        assert alike(personal(simulation, i), own)
        assert not since or not alike(own, simulation.server.state)
