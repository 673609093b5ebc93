"""Signs people in through an OpenID Connect provider. The sign-in page makes both calls: the provider sends the
browser back to it, and it passes the provider's parameters on.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from pydantic import BaseModel

from api.callers import ContextDep, audit, flow_cookie_name, refuse_cross_site, remember_caller
from api.requests import ProblemError
from api.routes.session import SignedIn, begin_session, set_cookie, sign_in_refused
from api.sign_in.provider import AuthorizationRequest, CodeRefused, InvalidToken, OpenIdProvider, ProviderUnavailable
from service.jobs.accounts import NotAdmitted, Person, parse_rules, person_of
from service.jobs.records import Conflict, NotFound
from service.jobs.store import Credential, SignInFlow
from service.jobs.store.sessions import FLOW_S

router = APIRouter(tags=["session"], include_in_schema=False)

RETURN_PATH = "/login/callback"
"""The page to which the provider sends browsers back; its address is registered at the provider."""


class SentAway(BaseModel):
    url: str
    """Where the browser signs in."""


@router.post("/login/oidc")
def begin_sign_in(request: Request, response: Response, context: ContextDep) -> SentAway:
    """Begin a sign-in at the provider."""
    refuse_cross_site(request)
    provider = _provider(context.provider)
    flow = context.store.sign_in_flows.begin()
    try:
        url = provider.authorization_url(_authorization(request, flow))
    except ProviderUnavailable as error:
        raise ProblemError(502, f"the sign-in provider cannot be used: {error}") from None
    set_cookie(request, response, flow_cookie_name(request), flow.browser, FLOW_S)
    return SentAway(url=url)


@router.post("/login/oidc/callback")
def finish_sign_in(
    *,
    request: Request,
    response: Response,
    context: ContextDep,
    state: Annotated[str, Form(min_length=1, max_length=200)],
    code: Annotated[str | None, Form(max_length=4000)] = None,
    iss: Annotated[str | None, Form(max_length=2000)] = None,
    error: Annotated[str | None, Form(max_length=200)] = None,
) -> SignedIn:
    """Begin a session of the person who signed in at the provider. Anything that does not fit gets 401."""
    store = context.store
    refuse_cross_site(request)
    provider = _provider(context.provider)
    try:
        flow = store.sign_in_flows.take(state, request.cookies.get(flow_cookie_name(request), ""))
        person = _signed_in(context, provider, request, flow, code=code, iss=iss, error=error)
        key = store.keys.admit(person, life_s=store.sessions.longest_s)
    except ProviderUnavailable as unavailable:
        raise ProblemError(502, f"the sign-in provider cannot be used: {unavailable}") from None
    except (InvalidToken, CodeRefused, NotAdmitted, Conflict, NotFound) as refusal:
        told = f"this sign-in is refused: {refusal}"
        raise sign_in_refused(request, store, told, reason=str(refusal)) from None
    response.delete_cookie(flow_cookie_name(request), httponly=True, secure=request.url.scheme == "https")
    remember_caller(request, key, Credential(key.id))
    audit(request, "person.admit", subject=key.id, project=key.project or "", scopes=",".join(key.scopes))
    return begin_session(request, response, store, key)


def _signed_in(
    context: ContextDep,
    provider: OpenIdProvider,
    request: Request,
    flow: SignInFlow | None,
    *,
    code: str | None,
    iss: str | None,
    error: str | None,
) -> Person:
    """Return who signed in, by the provider's answer."""
    if flow is None:
        raise InvalidToken("it was not begun in this browser, has already ended, or took too long; begin again")
    if not provider.is_issuer(iss):
        raise InvalidToken("the answer came from another provider")
    if code is None:
        raise CodeRefused(f"the provider answers {error or 'nothing'!r}")
    settings = context.settings
    claims = provider.claims(code, _authorization(request, flow))
    claimed = {"owner_claim": settings.oidc_owner_claim, "groups_claim": settings.oidc_groups_claim}
    return person_of(claims, parse_rules(settings.oidc_roles), **claimed)


def _authorization(request: Request, flow: SignInFlow) -> AuthorizationRequest:
    back = f"{request.url.scheme}://{request.url.netloc}{RETURN_PATH}"
    return AuthorizationRequest(flow.state, flow.nonce, flow.verifier, back)


def _provider(provider: OpenIdProvider | None) -> OpenIdProvider:
    if provider is None:
        raise ProblemError(404, "this service has no sign-in provider (TRIVET_OIDC_ISSUER)")
    return provider
