package check_test

import (
	"context"
	"fmt"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/check"
)

// The checks of an edge, as tunnel check prints them.
func Example() {
	list := check.Edge(check.EdgeConfig{Conf: new(conf.Edge)})
	lines := check.Run(context.Background(), list, func(l check.Line) { fmt.Println(l.State, l.Name, l.Text) })
	fmt.Println(check.Failed(lines))
}
