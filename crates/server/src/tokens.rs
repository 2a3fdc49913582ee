//! Who a token belongs to. What the store knows is remembered for a second: a token that was revoked elsewhere is refused
//! within that time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry_store::{Scope, TokenRecord};
use tokio::sync::{Notify, watch};

use crate::guard::{ANONYMOUS, Actor, LOCAL, unauthorized};
use crate::problem::Problem;
use crate::secret;
use crate::state::Shared;

const REMEMBERED: Duration = Duration::from_secs(1);
/// Maximum length of a token.
const TOKEN_MAX: usize = 256;

/// The tokens of the store, as they were read last.
#[derive(Default)]
pub struct Tokens {
    /// Held while the store is read, so that a later answer is never older.
    last: tokio::sync::Mutex<Option<(Instant, Arc<Vec<TokenRecord>>)>>,
    /// Tells readers of streams that tokens, or who needs none, have changed.
    pub changes: watch::Sender<()>,
    /// Tells the loop that looks for changes that there is a reader.
    pub came: Notify,
}

impl Shared {
    async fn tokens(&self) -> Result<Arc<Vec<TokenRecord>>, Problem> {
        self.tokens_within(REMEMBERED).await
    }

    /// Reads the tokens from the store, and tells readers of streams if they have changed.
    pub async fn refresh_tokens(&self) -> Result<(), Problem> {
        self.tokens_within(Duration::ZERO).await.map(drop)
    }

    async fn tokens_within(&self, age_max: Duration) -> Result<Arc<Vec<TokenRecord>>, Problem> {
        let mut last = self.tokens.last.lock().await;
        if let Some((at, tokens)) = &*last
            && at.elapsed() < age_max
        {
            return Ok(tokens.clone());
        }
        let tokens = Arc::new(self.store().tokens().await?);
        let is_same = last.as_ref().is_some_and(|(_, known)| *known == tokens);
        *last = Some((Instant::now(), tokens.clone()));
        if !is_same {
            self.tokens.changes.send_replace(());
        }
        Ok(tokens)
    }

    /// Forgets what was read: this node has changed it.
    pub async fn forget_tokens(&self) {
        *self.tokens.last.lock().await = None;
        self.tokens.changes.send_replace(());
    }

    /// A token by its id.
    pub async fn token(&self, id: &str) -> Result<Option<TokenRecord>, Problem> {
        Ok(self.tokens().await?.iter().find(|token| token.id == id).cloned())
    }

    /// Whether requests of this host need no token: `api.open`, and nobody else can reach the server.
    pub fn is_open(&self) -> bool {
        self.listen.ip().is_loopback() && self.settings().api.open
    }

    /// Whether a token is the local one, which `server.json` holds.
    pub fn is_local(&self, token: &str) -> bool {
        secret::same(&secret::hash(token), &secret::hash(&self.local_token))
    }

    /// Who sends a token. The local one is taken from this host alone.
    pub async fn actor_of(&self, token: &str, is_from_here: bool) -> Result<Actor, Problem> {
        if self.is_local(token) {
            return match is_from_here {
                true => Ok(Actor { id: LOCAL.into(), scope: Scope::Admin }),
                false => {
                    Err(unauthorized("token_local", "the local token is good on the server's own host only")
                        .way_out("`belfry token create` makes one that is good from elsewhere"))
                }
            };
        }
        let known = self.good(token, |known| Some(&known.hash)).await?;
        Ok(Actor { id: known.id, scope: known.scope })
    }

    /// Who sends the cookie of a browser login. It is good for reading.
    pub async fn reader_of(&self, cookie: &str) -> Result<Actor, Problem> {
        let known = self.good(cookie, |known| known.cookie_hash.as_ref()).await?;
        Ok(Actor { id: known.id, scope: Scope::Read })
    }

    /// The record whose hash a secret has, if it is good now.
    async fn good(
        &self,
        secret: &str,
        hash_of: impl Fn(&TokenRecord) -> Option<&Vec<u8>>,
    ) -> Result<TokenRecord, Problem> {
        let wrong = || unauthorized("token_wrong", "this server knows no such token");
        if secret.is_empty() || secret.len() > TOKEN_MAX || !secret.is_ascii() {
            return Err(wrong());
        }
        let tokens = self.tokens().await?;
        let known = secret::id(secret).and_then(|id| tokens.iter().find(|known| known.id == id));
        // A token that is not known takes as long as one that is.
        let kept = known.and_then(hash_of).map_or(&[0; 32][..], Vec::as_slice);
        let same = secret::same(&secret::hash(secret), kept);
        let known = known.filter(|_| same).ok_or_else(wrong)?;
        self.refuse_ended(known)?;
        Ok(known.clone())
    }

    fn refuse_ended(&self, token: &TokenRecord) -> Result<(), Problem> {
        match token {
            token if token.revoked_at.is_some() => {
                Err(unauthorized("token_revoked", "the token was revoked"))
            }
            token if !token.is_good(self.now()) => {
                Err(unauthorized("token_expired", "the token has expired"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a request that has waited, if its sender's token has ended meanwhile.
    pub async fn refuse_if_ended(&self, actor: &str) -> Result<(), Problem> {
        if [LOCAL, ANONYMOUS].contains(&actor) {
            return Ok(());
        }
        match self.token(actor).await? {
            Some(token) => self.refuse_ended(&token),
            None => Err(unauthorized("token_revoked", "the token was revoked")),
        }
    }
}
