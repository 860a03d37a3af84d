// Steps in which a connection ends in the middle of something.

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-sql-driver/mysql"
)

const (
	deadline = 20 * time.Second // until the server has noticed something
	sleep    = 60               // seconds a query would last that is to be killed
)

// until waits until the server lists the connection so many times, on that condition.
func (s session) until(count, connection int64, condition string) error {
	query := fmt.Sprintf("select count(*) from information_schema.processlist where id = %d %s", connection, condition)
	for end := time.Now().Add(deadline); ; time.Sleep(20 * time.Millisecond) {
		got, err := s.number(query)
		if err != nil || got == count {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %s is %d", deadline, query, count)
		}
	}
}

func (p plan) kill() (string, error) {
	victim, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer victim.close()
	killer, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer killer.close()
	number, err := victim.number("select connection_id()")
	if err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() {
		_, err := victim.number(fmt.Sprintf("select sleep(%d)", sleep))
		ended <- err
	}()
	err = first(
		func() error { return killer.until(1, number, "and info like 'select sleep%'") },
		func() error { return killer.exec(fmt.Sprintf("kill %d", number)) },
	)
	if err != nil {
		return "", err
	}
	var answer *mysql.MySQLError
	select {
	case err = <-ended:
	case <-time.After(deadline):
		return "", errors.New("the query goes on")
	}
	told := "connection lost"
	if errors.As(err, &answer) {
		told = fmt.Sprintf("error %d", answer.Number)
	} else if !errors.Is(err, mysql.ErrInvalidConn) {
		return "", fmt.Errorf("neither an answer nor a lost connection: %v", err)
	}
	return told, killer.until(0, number, "")
}

func (p plan) cut() (string, error) {
	other, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer other.close()
	s, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	number, err := s.number("select connection_id()")
	if err != nil {
		return "", err
	}
	vanish, cancel := context.WithCancel(context.Background())
	defer cancel()
	found, err := s.QueryContext(vanish, "select n, repeat('x', 100) from numbers")
	if err != nil {
		return "", err
	}
	for i := 0; i < 1000; i++ {
		if !found.Next() {
			return "", fmt.Errorf("only %d rows: %v", i, found.Err())
		}
	}
	if err := other.until(1, number, ""); err != nil {
		return "", err
	}
	cancel() // the driver closes the connection without a word
	if err := other.until(0, number, ""); err != nil {
		return "", err
	}
	found.Close()
	fresh, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer fresh.close()
	return "", fresh.expect(1, "select 1")
}
