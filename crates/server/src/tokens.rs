//! Who a token belongs to. What the store knows is remembered for a second: a token that was revoked elsewhere is refused
//! within that time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use belfry_store::{Access, Scope, TokenRecord};

use crate::guard::{Actor, unauthorized};
use crate::problem::Problem;
use crate::secret;
use crate::state::Shared;

const REMEMBERED: Duration = Duration::from_secs(1);
/// Longer ones are nobody's.
const TOKEN_MAX: usize = 256;

/// What the store knew, and when.
#[derive(Default)]
pub struct Remembered(tokio::sync::Mutex<Option<(Instant, Arc<Vec<TokenRecord>>)>>);

impl Shared {
    async fn tokens(&self) -> Result<Arc<Vec<TokenRecord>>, Problem> {
        let mut remembered = self.tokens.0.lock().await;
        if let Some((at, tokens)) = &*remembered
            && at.elapsed() < REMEMBERED
        {
            return Ok(tokens.clone());
        }
        let tokens = Arc::new(self.store().tokens().await?);
        *remembered = Some((Instant::now(), tokens.clone()));
        Ok(tokens)
    }

    /// What is remembered is no longer so.
    pub async fn forget_tokens(&self) {
        *self.tokens.0.lock().await = None;
    }

    /// Whether no token is needed: only this host reaches the server, and nobody has ever made one.
    pub async fn is_open(&self) -> Result<bool, Problem> {
        Ok(self.listen.ip().is_loopback() && self.tokens().await?.is_empty())
    }

    /// Whether it is what the server's owner was given.
    pub fn is_local(&self, token: &str) -> bool {
        secret::same(&secret::hash(token), &secret::hash(&self.local_token))
    }

    /// Whose token it is.
    pub async fn actor_of(&self, token: &str) -> Result<Actor, Problem> {
        let wrong = || unauthorized("token_wrong", "the token is none of this server's");
        if token.is_empty() || token.len() > TOKEN_MAX || !token.is_ascii() {
            return Err(wrong());
        }
        let hash = secret::hash(token);
        if self.is_local(token) {
            return Ok(Actor { id: "local".into(), scope: Scope::Admin });
        }
        let tokens = self.tokens().await?;
        let known = secret::id(token).and_then(|id| tokens.iter().find(|known| known.id == id));
        // As long as it takes for one that is known.
        let kept = known.map_or(&[0; 32][..], |known| &known.hash);
        let same = secret::same(&hash, kept);
        match known.filter(|_| same) {
            None => Err(wrong()),
            Some(known) if known.revoked_at.is_some() => {
                Err(unauthorized("token_revoked", "the token was revoked"))
            }
            Some(known) if !known.is_good(self.now()) => {
                Err(unauthorized("token_expired", "the token has expired"))
            }
            Some(known) => Ok(Actor { id: known.id.clone(), scope: known.scope }),
        }
    }
}
