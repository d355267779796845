package outbound

import (
	"context"

	"gatewayd/flow"
)

// refuser is an outbound that refuses everything.
type refuser struct{ refusal flow.Refusal }

// Reject is the outbound that refuses: TCP clients get a reset. Datagrams are
// dropped before they come here (gateway/udp.go).
func Reject() flow.Outbound {
	return &refuser{flow.Refusal{Verdict: flow.VerdictReset, Text: "reject: the rule refuses"}}
}

// Drop is the outbound that stays silent, as a dead host would.
func Drop() flow.Outbound {
	return &refuser{flow.Refusal{Verdict: flow.VerdictSilent, Text: "drop: the rule drops"}}
}

// DialStream refuses.
func (r *refuser) DialStream(context.Context, flow.Flow) (flow.Stream, error) {
	return nil, &r.refusal
}

// OpenLink refuses.
func (r *refuser) OpenLink(context.Context, flow.Flow, flow.Receiver) (flow.Link, error) {
	return nil, &r.refusal
}
