package route

import "fmt"

// Step tells how one rule met a query.
type Step struct {
	Rule    int // index, or DefaultRule
	Name    string
	Matched bool
	Why     string // the first condition that does not hold, or what a match did
}

// Explain is the walk of Route with reasons: each rule that was tried, in order.
// The last step is what decided. It allocates; it is for people.
func (p *Plane) Explain(q *Query) []Step {
	f := factsOf(q)
	var steps []Step
	for i := range p.rules {
		r := &p.rules[i]
		c := r.failing(&f)
		s := Step{Rule: i, Name: r.name, Matched: c == nothing}
		switch {
		case c != nothing:
			s.Why = r.why(c, &f)
		case r.outbound != nil:
			s.Why = "every condition holds"
		default:
			s.Why = "every condition holds; records only, matching goes on"
		}
		steps = append(steps, s)
		if s.Matched && r.outbound != nil {
			return steps
		}
	}
	return append(steps, Step{Rule: DefaultRule, Matched: true, Why: "no rule decided"})
}

// why puts the condition that fails into words.
func (m *matcher) why(c condition, f *facts) string {
	switch c {
	case onNetwork:
		return fmt.Sprintf("network is %v", f.network)
	case onInbound:
		return fmt.Sprintf("inbound is %q", f.inbound)
	case onPort:
		return portWhy("port", f.port, f)
	case onSourcePort:
		return portWhy("source_port", f.sourcePort, f)
	case onIP:
		return fmt.Sprintf("ip is %v", f.destination)
	case onSource:
		return fmt.Sprintf("source is %v", f.source)
	case onWho:
		return f.who.why(m.whose.failing(f), f.source)
	case onNot:
		return "not: every condition in it holds"
	case onAll:
		i := firstFailing(m.all, f)
		return fmt.Sprintf("all[%d]: %s", i, m.all[i].why(m.all[i].failing(f), f))
	case onAny:
		return fmt.Sprintf("any: none of %d holds", len(m.any))
	}
	return ""
}

func portWhy(name string, port uint16, f *facts) string {
	if !f.hasPorts {
		return name + ": icmp has no ports"
	}
	return fmt.Sprintf("%s is %d", name, port)
}
